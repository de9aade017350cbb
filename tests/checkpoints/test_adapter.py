"""Adapters in PEFT's format: merging, and the error of each invalid one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import causal_model, whole
from outpace.checkpoints.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LowRank,
    match_pattern,
    save_adapter,
)
from outpace.checkpoints.load import load_adapter, load_model, save_model

GOLDEN = Path(__file__).parent.parent / "golden" / "d2f"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
QUERY = "model.layers.1.self_attn.q_proj"
DOWN = f"base_model.model.{QUERY}.lora_A.weight"
UP = f"base_model.model.{QUERY}.lora_B.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_model(causal_model(), tmp_path / "base", dtype=torch.float32)
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Write an adapter of layer 2's queries and down projection, of rank 2 and scale 1.5."""
    torch.manual_seed(0)
    sizes = {QUERY: (32, 32), "model.layers.1.mlp.down_proj": (32, 48)}
    updates = {
        f"{name}.weight": LowRank(torch.randn(2, size[1]), torch.randn(size[0], 2), 1.5)
        for name, size in sizes.items()
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "a_later_option": None}
    save_adapter(tmp_path / "adapter", updates, config)
    return tmp_path / "adapter"


def change(folder: Path, **fields: object) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(folder: Path, drop: str = "", **tensors: torch.Tensor) -> None:
    kept = {**load_file(folder / ADAPTER_WEIGHTS), **tensors}
    kept.pop(drop, None)
    save_file(kept, folder / ADAPTER_WEIGHTS)


def queries(model: torch.nn.Module) -> torch.Tensor:
    return model.blocks[1].attention.qkv.weight[:32]


def test_update_is_added_to_its_rows_of_a_fused_matrix(base: Path, adapter: Path) -> None:
    plain, merged = load_model(base), load_model(base, adapter=adapter)
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    delta = 1.5 * tensors[UP] @ tensors[DOWN]
    assert torch.allclose(queries(merged) - queries(plain), delta, atol=1e-5)
    changed = {
        name
        for (name, ours), theirs in zip(merged.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(ours, theirs)
    }
    assert changed == {"blocks.1.attention.qkv.weight", "blocks.1.mlp.down.weight"}
    fused = "blocks.1.attention.qkv.weight"
    rest = [dict(model.named_parameters())[fused][32:] for model in (merged, plain)]
    assert torch.equal(*rest)


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_published_adapters_load(family: str) -> None:
    folder = GOLDEN / f"{family}_tiny"
    adapter = GOLDEN / f"{family}_tiny_lora"
    updates = load_adapter(adapter).updates
    assert len(updates) == 3 * 4 and {update.scale for update in updates.values()} == {2.0}
    merged = whole(load_model(folder, adapter=adapter), IDS, causal=False)
    assert (merged - whole(load_model(folder), IDS, causal=False)).abs().max() > 1


def test_pattern_gives_a_module_its_own_rank_and_alpha(base: Path, adapter: Path) -> None:
    torch.manual_seed(1)
    down, up = torch.randn(3, 32), torch.randn(32, 3)
    rewrite(adapter, **{DOWN: down, UP: up})
    patterns = {r"layers\.1\..*q_proj": 3, "q_proj": 5}
    change(adapter, rank_pattern=patterns, alpha_pattern={"self_attn.q_proj": 12})
    plain, merged = load_model(base), load_model(base, adapter=adapter)
    assert torch.allclose(queries(merged) - queries(plain), 4 * up @ down, atol=1e-5)
    assert match_pattern({"proj": 1}, QUERY, 2) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, r"adapter_config\.json: peft_type must be 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora is True, which is not supported; supported: low-rank"),
        ({"a_later_option": {"on": True}}, r"a_later_option is \{'on': True\}, which is not"),
        ({"bias": "all"}, "bias must be 'none', got 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be one of true.*got 'pissa'"),
        ({"r": 0}, "r must be a whole number from 1.*got 0"),
        ({"lora_alpha": "3"}, "lora_alpha must be a positive number below 1e18.*got '3'"),
        ({"rank_pattern": {"(": 1}}, r"rank_pattern must be patterns of names.*got \{'\(': 1\}"),
        ({"r": 8}, r"(q|down)_proj has matrices \(2, .*requires rank 8"),
        ({"rank_pattern": {"q_proj": 1}}, rf"{QUERY} has matrices \(2, 32\).*rank 1"),
    ],
)
def test_invalid_settings_are_refused(
    adapter: Path, fields: dict[str, object], message: str
) -> None:
    change(adapter, **fields)
    with pytest.raises(ValueError, match=message):
        load_adapter(adapter)


def test_unknown_tensor_is_refused(adapter: Path) -> None:
    rewrite(adapter, **{"base_model.model.lm_head.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"'base_model\.model\.lm_head\.weight' does not belong"):
        load_adapter(adapter)


def test_unpaired_matrix_is_refused(adapter: Path) -> None:
    rewrite(adapter, drop=UP)
    with pytest.raises(ValueError, match=r"no partner '.*q_proj\.lora_B\.weight'"):
        load_adapter(adapter)


def test_adapter_of_another_shape_is_refused(base: Path, adapter: Path) -> None:
    rewrite(adapter, **{DOWN: torch.zeros(2, 48)})
    with pytest.raises(ValueError, match=r"has shape \(32, 48\), but the weight \(32, 32\)"):
        load_model(base, adapter=adapter)
