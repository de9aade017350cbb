"""Tests of stored features: training equals that on computed ones; others are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import causal_model, published_eagle
from outpace.checkpoints.load import ZOO_FOLDER
from outpace.models.transformer import Transformer
from outpace.training import Data, Objective, Trainer, store, weights
from outpace.training.objectives import SFT, DFlash, Eagle3
from runs import losses, trainer
from sharded import DRAFT

TARGET = {"vocab_size": 1024}
WIDE = published_eagle(vocab_size=1024, draft_vocab_size=1024)


def data(path: Path, count: int = 70) -> Path:
    """Lines of many lengths."""
    lines = [{"prompt": f"{n} + 1 = ?", "response": f"{n} " * (n % 9 + 3)} for n in range(count)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def drafting(
    folder: Path,
    name: str,
    objective: Objective | None = None,
    target: Transformer | None = None,
    **options: Any,
) -> Trainer:
    """A trainer of a tiny draft, by default on stored features."""
    target = target or causal_model(**TARGET)
    objective = objective or DFlash(anchors=4)
    given = {"path": str(folder / "data.jsonl"), "features": str(folder / "features")}
    given |= options.pop("data", {})
    defaults = {"lr": 1e-3, "warmup": 2, "batch": 8, "accumulation": 2, "log_every": 1, "steps": 6}
    return Trainer(
        weights.build_draft(None, WIDE if isinstance(objective, Eagle3) else DRAFT, target, 0),
        objective,
        data=Data(**given),
        out=folder / name,
        tokenizer=ZOO_FOLDER / "vocabulary",
        others={"target": target},
        **{**defaults, **options},
    )


@pytest.mark.parametrize(
    ("objective", "read"),
    [(DFlash(anchors=4), 0), (DFlash(anchors=4, divergence=True), 1), (Eagle3(tokens=2), 1)],
)
def test_stored_features_train_as_live_ones(
    objective: Objective, read: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(tmp_path / "data.jsonl")
    drafting(tmp_path, "live", objective, data={"features": None}).fit()
    run = drafting(tmp_path, "stored", objective)
    run.fit()
    assert losses(tmp_path / "stored") == pytest.approx(losses(tmp_path / "live"), rel=1e-4)
    assert "GiB" in capsys.readouterr().out
    found = sorted((tmp_path / "features").glob("*.safetensors"))
    assert len(found) == 3 and {len(load_file(path)) for path in found} == {32, 6}
    first = load_file(found[0])["0"]
    assert first.shape[1] == (2 + read) * 32 and first.dtype == torch.float32
    target = run.loss_module.models.others["target"]
    target.blocks = torch.nn.ModuleList()  # no longer needed
    run.train_step(6, 8)


def test_what_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    other = causal_model(**TARGET)
    with torch.no_grad():
        other.blocks[1].mlp.down.weight[3, 5] += 1.0
    for named, options in {
        "target": {"target": other},
        "tokenization": {"data": {"longest": 20}},
        "last": {"objective": DFlash(anchors=4, divergence=True)},
        "computed": {"precision": "bf16"},
    }.items():
        with pytest.raises(ValueError, match=f"differs in {named} from"):
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


@pytest.mark.parametrize(
    ("objective", "given", "message"),
    [
        (DFlash(features=False), {}, "needs an objective that reads features"),
        (DFlash(), {"path": "story:train"}, "endless generated problems"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    objective: Objective, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data(tmp_path / "data.jsonl", 8)
    with pytest.raises(ValueError, match=message):
        drafting(tmp_path, "run", objective, data=given)
    with pytest.raises(ValueError, match="^features"):
        where = Data(path=str(tmp_path / "data.jsonl"), features=str(tmp_path / "f"))
        trainer(tmp_path / "sft", data=where)
    with pytest.raises(ValueError, match="^features"):
        replace(where, features=" ")
    assert SFT().feature_spec(causal_model().config) is None
