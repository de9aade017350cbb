"""Adapters kept apart from the base: each invalid one is refused before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapting import write_adapter
from helpers import published
from outpace import LLM, OptionError
from outpace.checkpoints.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LowRank,
    save_adapter,
)
from outpace.checkpoints.adapter_fit import load_adapters
from outpace.checkpoints.load import load_adapter, translate_config
from outpace.models.adapted import OutputUpdate

CONFIG = translate_config(published())
QUERY = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "mine", CONFIG)


def test_updates_have_their_outputs_of_stacked_layers(folder: Path) -> None:
    updates = load_adapters({"x": folder}, CONFIG, torch.float32)["x"]
    assert len(updates) == 9  # head, and four layers in each of two blocks
    found = [update.outputs for update in updates["blocks.0.attention.qkv"]]
    assert found == [slice(0, 32), slice(32, 48), slice(48, 64)]
    keys: OutputUpdate = updates["blocks.0.attention.qkv"][1]
    published_keys = load_adapter(folder).updates["model.layers.0.self_attn.k_proj.weight"]
    assert torch.allclose(keys.up @ keys.down, published_keys.compute_delta(), atol=1e-6)
    half = load_adapters({"x": folder}, CONFIG, torch.bfloat16)["x"]
    assert {each.up.dtype for each in half["unembedding"]} == {torch.bfloat16}


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensor(folder: Path, value: float) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    tensors[f"base_model.model.{QUERY}.lora_B.weight"][0, 0] = value
    save_file(tensors, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r must be a whole number from 1"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which is not"),
        ({"bias": "lora_only"}, "bias must be 'none', got 'lora_only'"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a positive number"),
    ],
)
def test_invalid_settings_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(OptionError, match=rf"^adapters\.mine: .*{message}") as caught:
        load_adapters({"mine": folder}, CONFIG, torch.float32)
    assert caught.value.param == "adapters"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_updates_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    change_tensor(folder, value)
    with pytest.raises(OptionError, match="must have finite values"):
        load_adapters({"mine": folder}, CONFIG, torch.float32)
    change_tensor(folder, 1e5)
    load_adapters({"mine": folder}, CONFIG, torch.float32)
    with pytest.raises(OptionError, match=r"q_proj.weight' exceeds the range of torch.float16"):
        load_adapters({"mine": folder}, CONFIG, torch.float16)


def write_update(folder: Path, name: str, outputs: int, inputs: int) -> Path:
    update = LowRank(torch.ones(2, inputs), torch.ones(outputs, 2), 1.0)
    save_adapter(folder, {name: update}, {"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    return folder


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"{QUERY}.weight", (32, 64), r"has shape \(32, 64\), but the weight \(32, 32\)"),
        ("model.layers.7.self_attn.q_proj.weight", (32, 32), "the model has no 'model.layers.7"),
        ("model.embed_tokens.weight", (24, 32), "is not the matrix of a linear layer"),
        ("model.norm.weight", (32, 32), r"but the weight \(32,\)"),
    ],
)
def test_updates_of_other_modules_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, int], message: str
) -> None:
    folder = write_update(tmp_path, name, *shape)
    with pytest.raises(OptionError, match=message):
        load_adapters({"mine": folder}, CONFIG, torch.float32)


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["a"], "adapters must map names to folders"),
        ("a", "adapters must map names to folders"),
        ({"": "a"}, "a name must be printable text"),
        ({"\ud800": "a"}, "a name must be printable text"),
        ({1: "a"}, "a name must be printable text"),
        ({"mine": None}, r"adapters\.mine: adapter must be a name or a path, got None"),
        ({"mine": "nowhere"}, r"adapters\.mine: no model 'nowhere'"),
        ({"mine": "."}, r"adapters\.mine: adapter_config\.json does not exist"),
    ],
)
def test_invalid_options_are_refused(
    adapters: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message) as caught:
        LLM("tiny-ar", adapters=adapters)
    assert caught.value.param == "adapters"
