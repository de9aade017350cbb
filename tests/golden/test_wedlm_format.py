"""Logits of the WeDLM authors' model code in both shapes, and what their format may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import close, published, same_weights
from literal import Memory
from outpace.checkpoints.load import load_model, save_model, translate_config
from outpace.decoding import Forward, Kind

FOLDER = Path(__file__).parent / "wedlm"
CASES = json.loads((FOLDER / "forward.json").read_text())
EXPECTED = load_file(FOLDER / "forward.safetensors")


@pytest.mark.parametrize("order", ["plain", "reordered"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["variant"])
def test_logits_of_a_window(case: dict[str, Any], order: str) -> None:
    model = load_model(FOLDER / case["variant"])
    moved = order == "reordered"
    ids = case["reordered_ids"] if moved else case["ids"]
    places = case["reordered_position_ids"] if moved else None
    hidden, _ = Memory(model).run(Forward(ids=ids, start=0, positions=places))
    ours = model.compute_logits(hidden).clone()
    close(ours, EXPECTED[f"{case['variant']}.{order}_logits"], 2e-3)


@pytest.mark.parametrize("name", ["qwen3", "qwen25"])
def test_saved_model_has_the_published_names(name: str, tmp_path: Path) -> None:
    save_model(load_model(FOLDER / name), tmp_path, dtype=torch.float32)
    same_weights(tmp_path, FOLDER / name)
    assert "auto_map" in json.loads((tmp_path / "config.json").read_text())


def config(**fields: Any) -> dict[str, Any]:
    """A tiny `config.json` of the format."""
    return published("WeDLMForCausalLM", **fields)


@pytest.mark.parametrize(
    ("fields", "bias", "norm"),
    [
        ({}, True, False),
        ({"attention_bias": False}, False, True),
        ({"attention_bias": False, "qk_norm": False}, False, False),
        ({"attention_bias": True, "qk_norm": True}, True, True),
    ],
)
def test_queries_are_normed_where_they_have_no_bias(
    fields: dict[str, bool], bias: bool, norm: bool
) -> None:
    ours = translate_config(config(**fields))
    assert (ours.qkv_bias, ours.qk_norm, ours.out_bias) == (bias, norm, False)
    assert (ours.shift, ours.kind) == (1, Kind.causal_kind(ours.mask_id))


def test_head_size_is_what_it_says() -> None:
    assert translate_config(config(head_dim=24)).head_dim == 24
    assert translate_config(config(head_dim=None)).head_dim == 8


def test_mask_is_the_named_token_or_that_of_the_published_models(tmp_path: Path) -> None:
    assert translate_config(config(mask_token_id=5)).mask_id == 5
    assert translate_config(config(vocab_size=151936)).mask_id == 151665
    assert translate_config(config()).mask_id is None
    folder = FOLDER / "qwen3"
    assert load_model(folder).config.mask_id == 319
    assert load_model(folder, mask_id=7).config.mask_id == 7
    with pytest.raises(ValueError, match="mask_id 400 is outside the vocabulary of 320"):
        load_model(folder, mask_id=400)


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="use_sliding_window"):
        translate_config(config(use_sliding_window=True))
