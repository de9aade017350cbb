"""Logits of the Dream authors' model code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers import close, whole
from outpace.checkpoints.load import load_model
from outpace.models.transformer import Transformer

FOLDER = Path(__file__).parent / "dream"
CASES = json.loads((FOLDER / "cases.json").read_text())["logits"]
EXPECTED = load_file(FOLDER / "expected.safetensors")


@pytest.fixture(scope="module")
def model() -> Transformer:
    """The tiny checkpoint in Dream's format."""
    return load_model(FOLDER / "model")


@pytest.mark.parametrize("case", [c for c in CASES if not c["padding"]], ids=lambda c: c["id"])
def test_logits_of_a_canvas(model: Transformer, case: dict) -> None:
    close(whole(model, case["input_ids"], causal=False), EXPECTED[case["id"]])


def test_logits_of_a_padded_batch(model: Transformer) -> None:
    (case,) = (c for c in CASES if c["padding"])
    batch = zip(case["input_ids"], case["attention_mask"], EXPECTED[case["id"]], strict=True)
    for ids, mask, official in batch:
        first = mask.index(1)
        assert 1 in mask and all(mask[first:])
        close(whole(model, ids[first:], causal=False), official[first:])
    assert len(case["input_ids"]) == 2


def test_every_case_is_here() -> None:
    assert len(CASES) == 4
