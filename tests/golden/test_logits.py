"""Logits of the model code of Dream's, LLaDA's and WeDLM's authors, and of gated delta layers."""

import json
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import GOLDEN, close, run, whole
from literal import Memory
from outpace.checkpoints.load import load_model
from outpace.decoding import Forward, Sample
from outpace.engine.runner import Runner
from outpace.models.transformer import Transformer

Case = dict[str, Any]
STEPS = 40
"""Rows that run step by step: more than a state keeps."""
HYBRID = json.loads((GOLDEN / "hybrid" / "cases.json").read_text())
WINDOWS = json.loads((GOLDEN / "wedlm" / "forward.json").read_text())
CANVASES = [
    (family, case)
    for family in ("dream", "llada")
    for case in json.loads((GOLDEN / family / "cases.json").read_text())["logits"]
]


@cache
def model_of(path: str) -> Transformer:
    return load_model(GOLDEN / path)


@cache
def expected(path: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / path)


@pytest.mark.parametrize(("family", "case"), CANVASES, ids=lambda value: str(value)[:20])
def test_logits_of_a_canvas(family: str, case: Case) -> None:
    model = model_of(f"{family}/{case.get('model', 'model')}")
    official, ids = expected(f"{family}/expected.safetensors")[case["id"]], case["input_ids"]
    if not case.get("attention_mask"):
        close(whole(model, ids, causal=False), official)
        return
    for row, mask, logits in zip(ids, case["attention_mask"], official, strict=True):
        first = mask.index(1)  # padding is on the left
        assert all(mask[first:])
        close(whole(model, row[first:], causal=False), logits[first:])


@pytest.mark.parametrize("order", ["plain", "reordered"])
@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case["variant"])
def test_logits_of_a_window(case: Case, order: str) -> None:
    model = model_of(f"wedlm/{case['variant']}")
    moved = order == "reordered"
    ids = case["reordered_ids"] if moved else case["ids"]
    positions = case["reordered_position_ids"] if moved else None
    hidden, _ = Memory(model).run(Forward(ids=ids, start=0, positions=positions))
    official = expected("wedlm/forward.safetensors")[f"{case['variant']}.{order}_logits"]
    close(model.compute_logits(hidden).clone(), official, 2e-3)


@pytest.mark.parametrize("name", HYBRID)
def test_logits_of_gated_delta_layers(name: str) -> None:
    case, official = HYBRID[name], expected(f"hybrid/{name}/expected.safetensors")
    ours = whole(model_of(f"hybrid/{name}"), case["ids"], causal=True)
    close(ours[:: case["every"]], official["whole"])


@pytest.mark.parametrize("rejected", [0, 3])
@pytest.mark.parametrize("name", HYBRID)
def test_logits_step_by_step(name: str, rejected: int) -> None:
    case, official = HYBRID[name], expected(f"hybrid/{name}/expected.safetensors")
    each = Runner(name, model_of(f"hybrid/{name}"), slots=256)
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
    close(ours, official["steps"][: len(ours)])


def test_every_case_is_here() -> None:
    assert [family for family, _ in CANVASES] == ["dream"] * 4 + ["llada"] * 7
    padded = [case for _, case in CANVASES if case.get("attention_mask")]
    assert len(padded) == 2 and all(len(case["input_ids"]) > 1 for case in padded)
