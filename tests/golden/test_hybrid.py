"""Gated delta layers equal transformers' recorded logits, whole and step by step."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers import GOLDEN, close, run, whole
from outpace.checkpoints.load import load_model
from outpace.decoding import Forward, Sample
from outpace.engine.runner import Runner

FOLDER = GOLDEN / "hybrid"
STEPS = 40
"""Rows that run step by step: more than a state keeps."""
CASES = json.loads((FOLDER / "cases.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_whole_text(name: str) -> None:
    case, expected = CASES[name], load_file(FOLDER / name / "expected.safetensors")
    ours = whole(load_model(FOLDER / name), case["ids"], causal=True)
    close(ours[:: case["every"]], expected["whole"])


@pytest.mark.parametrize("rejected", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_logits_step_by_step(name: str, rejected: int) -> None:
    case, expected = CASES[name], load_file(FOLDER / name / "expected.safetensors")
    each = Runner(name, load_model(FOLDER / name), slots=256)
    table = each.reserve(120)
    assert table is not None
    found = []
    for slot, token in enumerate(case["ids"][:STEPS]):
        forward = Forward(
            ids=[token, *[slot % 40] * rejected],
            start=slot,
            predict=[slot + 1],
            read=Sample(keep=True),
        )
        (out,) = run(each, [forward], [table])
        assert out.logits is not None
        found.append(out.logits[0])
    ours = torch.stack(found)[:: case["every"]]
    close(ours, expected["steps"][: len(ours)])
