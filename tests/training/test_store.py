"""Tests of stored features: training equals that on computed ones; others are rejected."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import VOCAB, causal_model, hybrid_model, published_eagle, whole
from outpace.attention.ranges import causal_ranges
from outpace.checkpoints.hub import ZOO_TOKENIZER
from outpace.models.transformer import Transformer
from outpace.training import Data, Objective, Trainer, store
from outpace.training.objective import FeatureSpec
from outpace.training.objectives import SFT, DFlash, Eagle3
from outpace.training.rows import Rows
from runs import draft_trainer, losses, trainer, write_lines
from sharded import DRAFT

EAGLE = published_eagle(vocab_size=1024, draft_vocab_size=1024)


def data(path: Path, count: int = 70) -> None:
    """Write lines of many lengths."""
    records = [{"prompt": f"{n} + 1 = ?", "response": f"{n} " * (n % 9 + 3)} for n in range(count)]
    write_lines(path, *records)


def drafting(
    folder: Path, name: str, objective: Objective | None = None, **options: Any
) -> Trainer:
    """A trainer of a tiny draft, by default on stored features."""
    objective = objective or DFlash(anchors=4)
    given = {"path": str(folder / "data.jsonl"), "features": str(folder / "features")}
    given |= options.pop("data", {})
    layers = options["target"].config.layers if "target" in options else 2
    config = EAGLE if isinstance(objective, Eagle3) else {**DRAFT, "num_target_layers": layers}
    defaults = {"lr": 1e-3, "batch": 8, "accumulation": 2, "log_every": 1, "steps": 6}
    defaults |= {"data": Data(**given), **options}
    return draft_trainer(folder / name, config, objective, **defaults)


@pytest.mark.parametrize(
    ("objective", "read", "build_target", "precision"),
    [
        (DFlash(anchors=4), 0, causal_model, "no"),
        (DFlash(anchors=4, divergence=True), 1, causal_model, "no"),
        (Eagle3(tokens=2), 1, hybrid_model, "no"),
        (DFlash(anchors=4), 0, hybrid_model, "bf16"),
    ],
)
def test_stored_features_train_as_live_ones(
    objective: Objective,
    read: int,
    build_target: Callable[..., Transformer],
    precision: str,
    tmp_path: Path,
) -> None:
    data(tmp_path / "data.jsonl")
    options: dict[str, Any] = {
        "target": build_target(seed=1, vocab_size=1024),
        "precision": precision,
    }
    drafting(tmp_path, "live", objective, data={"features": None}, **options).fit()
    run = drafting(tmp_path, "stored", objective, **options)
    run.fit()
    near = 1e-4 if precision == "no" else 1e-2
    assert losses(tmp_path / "stored") == pytest.approx(losses(tmp_path / "live"), rel=near)
    found = sorted((tmp_path / "features").glob("*.safetensors"))
    assert len(found) == 3 and {len(load_file(path)) for path in found} == {32, 6}
    first = load_file(found[0])["0"]
    assert first.shape[1] == (2 + read) * 32 and first.dtype == torch.float32
    target = run.loss_module.models.others["target"]
    target.blocks = torch.nn.ModuleList()  # no longer needed
    run.train_step(6, 8)


def test_features_have_the_dtype_of_the_target(tmp_path: Path) -> None:
    data(tmp_path / "data.jsonl")
    run = drafting(tmp_path, "run", target=causal_model(seed=1, vocab_size=1024).bfloat16())
    features = run.feature_store
    assert features is not None

    def scored(rows: Rows, reading: FeatureSpec) -> torch.Tensor:
        """Float32, as quantized matrices return."""
        return torch.ones(len(rows), 2 * 32)

    found = features.compute_features(scored, [0, 1, 2], 1, 8, torch.device("cpu"))
    assert {part.dtype for part in found.values()} == {torch.bfloat16}
    sizes = sum(part.nbytes for part in found.values())
    assert sizes == features.row_bytes * sum(map(len, found.values()))


def test_features_of_packed_examples_are_those_of_each_alone() -> None:
    target, reading = hybrid_model(seed=1), FeatureSpec((0, 1, 2), last=True)
    texts = [torch.arange(n * n, n * n + length) % VOCAB for n, length in enumerate((1, 70, 9, 3))]
    starts = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
    ranges = torch.cat([causal_ranges(len(t)) + at for t, at in zip(texts, starts, strict=True)])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    packed = reading.joined_states(target, torch.cat(texts), positions, ranges.int())
    for text, found in zip(texts, packed.split([*map(len, texts)]), strict=True):
        own = torch.arange(len(text))
        alone = reading.joined_states(target, text, own, causal_ranges(len(text)))
        torch.testing.assert_close(found, alone, atol=2e-4, rtol=2e-4)
        logits = target.compute_logits(found[:, -target.config.dim :])
        wanted = whole(target, text.tolist(), causal=True)
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=2e-4)


def test_models_with_delta_layers_are_not_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gated delta"):
        Trainer(hybrid_model(), SFT(), data="story:train", out=tmp_path, tokenizer=ZOO_TOKENIZER)


def test_interrupted_storing_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data(tmp_path / "data.jsonl")
    left = 1

    def save(tensors: Any, path: Path, metadata: dict[str, str]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        store_file(tensors, path, metadata)

    store_file = store.save_file
    monkeypatch.setattr(store, "save_file", save)
    with pytest.raises(ValueError, match="No space left"):
        drafting(tmp_path, "run").fit()
    kept = tmp_path / "features" / "features-000000.safetensors"
    before = kept.stat().st_mtime_ns
    assert [path.name for path in (tmp_path / "features").glob("*features-*")] == [kept.name]
    monkeypatch.undo()
    drafting(tmp_path, "run").fit()
    assert kept.stat().st_mtime_ns == before
    assert len([*(tmp_path / "features").glob("features-*.safetensors")]) == 3


def test_other_features_are_refused(tmp_path: Path) -> None:
    data(tmp_path / "data.jsonl", 8)
    drafting(tmp_path, "run").fit(1)
    other = causal_model(vocab_size=1024)
    with torch.no_grad():
        other.blocks[1].mlp.down.weight[3, 5] += 1.0
    for named, options in {
        "target": {"target": other},
        "tokenization": {"data": {"longest": 20}},
        "last": {"objective": DFlash(anchors=4, divergence=True)},
        "computed": {"precision": "bf16"},
    }.items():
        with pytest.raises(ValueError, match=named):
            drafting(tmp_path, "other", **options)
    kept = (tmp_path / "data.jsonl").read_text().splitlines(keepends=True)
    for lines in (kept[:-1], kept[::-1], [kept[1], *kept]):
        (tmp_path / "data.jsonl").write_text("".join(lines))
        with pytest.raises(ValueError, match=" data "):
            drafting(tmp_path, "other")
    (tmp_path / "data.jsonl").write_text("".join(kept))
    (tmp_path / "features" / store.INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="features.json"):
        drafting(tmp_path, "other")
    with pytest.raises(ValueError, match="features"):
        drafting(tmp_path, "other", data={"features": str(tmp_path)})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    data(tmp_path / "data.jsonl", 8)
    drafting(tmp_path, "run").fit(1)
    (path,) = (tmp_path / "features").glob("features-*.safetensors")
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(ValueError, match="features-000000"):
        drafting(tmp_path, "run").fit(2)
    path.unlink()
    drafting(tmp_path, "run").fit(2)


def test_unusable_features_are_refused(tmp_path: Path) -> None:
    data(tmp_path / "data.jsonl", 8)
    with pytest.raises(ValueError, match="^features"):
        drafting(tmp_path, "run", data={"path": "story:train"})
    with pytest.raises(ValueError, match="^features"):
        where = Data(path=str(tmp_path / "data.jsonl"), features=str(tmp_path / "f"))
        trainer(tmp_path / "sft", data=where)
    with pytest.raises(ValueError, match="^features"):
        replace(where, features=" ")
    assert SFT().feature_spec(causal_model().config) is None
