"""Drafts of targets with gated delta layers: no state passes from one example to another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import VOCAB, hybrid_model, published_eagle, whole
from outpace.attention.ranges import causal_ranges
from outpace.checkpoints.load import ZOO_FOLDER
from outpace.training import Data, Objective, Trainer, weights
from outpace.training.objective import FeatureSpec
from outpace.training.objectives import SFT, DFlash, Eagle3
from runs import losses
from sharded import DRAFT


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Lines of many lengths."""
    lines = [{"prompt": f"{n} + 1 = ?", "response": f"{n} " * (n % 9 + 3)} for n in range(24)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


READING = FeatureSpec((0, 1, 2), last=True)


def test_features_of_packed_examples_are_those_of_each_alone() -> None:
    target = hybrid_model(seed=1)
    texts = [torch.arange(n * n, n * n + length) % VOCAB for n, length in enumerate((1, 70, 9, 3))]
    starts = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
    ranges = torch.cat([causal_ranges(len(t)) + at for t, at in zip(texts, starts, strict=True)])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    packed = READING.joined_states(target, torch.cat(texts), positions, ranges.int())
    for text, found in zip(texts, packed.split([*map(len, texts)]), strict=True):
        own = torch.arange(len(text))
        alone = READING.joined_states(target, text, own, causal_ranges(len(text)))
        torch.testing.assert_close(found, alone, atol=2e-4, rtol=2e-4)
        logits = target.compute_logits(found[:, -target.config.dim :])
        wanted = whole(target, text.tolist(), causal=True)
        torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=2e-4)


DFLASH_DRAFT = {**DRAFT, "num_target_layers": 3}
EAGLE_DRAFT = published_eagle(vocab_size=1024, draft_vocab_size=1024)


@pytest.mark.parametrize(
    ("objective", "draft", "precision"),
    [
        (DFlash(anchors=4), DFLASH_DRAFT, "no"),
        (DFlash(anchors=4), DFLASH_DRAFT, "bf16"),
        (Eagle3(tokens=2), EAGLE_DRAFT, "no"),
    ],
)
def test_a_draft_of_such_a_target_trains(
    objective: Objective, draft: dict[str, Any], precision: str, data: str, tmp_path: Path
) -> None:
    found = []
    for name, features in (("live", None), ("stored", str(tmp_path / "features"))):
        target = hybrid_model(seed=1, vocab_size=1024)
        run = Trainer(
            weights.build_draft(None, draft, target, 0),
            objective,
            data=Data(path=data, features=features),
            out=tmp_path / name,
            tokenizer=ZOO_FOLDER / "vocabulary",
            others={"target": target},
            lr=3e-3,
            warmup=2,
            batch=8,
            log_every=1,
            steps=8,
            precision=precision,
        )
        run.fit()
        found.append(losses(tmp_path / name))
    assert found[0][-1] < found[0][0]
    assert found[0] == pytest.approx(found[1], rel=1e-4 if precision == "no" else 1e-2)


def test_such_a_model_itself_is_not_trained(data: str, tmp_path: Path) -> None:
    given = Data(path=data)
    with pytest.raises(ValueError, match="gated delta"):
        Trainer(
            hybrid_model(), SFT(), data=given, out=tmp_path, tokenizer=ZOO_FOLDER / "vocabulary"
        )
