"""Adapters in PEFT's format, merged and separate, and the error of each invalid one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapting import write_adapter
from helpers import causal_model, published, whole
from outpace import LLM
from outpace.checkpoints.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Adapter,
    LowRank,
    save_adapter,
)
from outpace.checkpoints.adapter_fit import load_adapters
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.methods import Autoregressive, WeDLM
from refusal import refuses

CONFIG = translate_config(published())
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


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(folder / ADAPTER_WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
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


WEDLM = {"architectures": ["WeDLMForCausalLM"], "model_type": "wedlm", "mask_token_id": 1021}


def test_a_model_has_the_configuration_that_its_adapter_was_trained_with(tmp_path: Path) -> None:
    write_adapter(tmp_path, load_config("tiny-ar"), size=0.01, parts=("attention",))
    change(tmp_path, model_config=WEDLM)
    llm = LLM("tiny-ar", adapter=tmp_path)
    assert isinstance(llm.method, WeDLM) and llm.config.mask_id == 1021
    same = WeDLM(verify=True), Autoregressive()
    one, other = (llm.generate([IDS], method=each, max_tokens=12)[0].ids for each in same)
    assert one == other
    with refuses("adapters"):
        LLM("tiny-ar", adapters={"mine": tmp_path})
    for kind in ("a2d-qwen2", "a2d-qwen9"):  # not shifted, unknown
        other = {"architectures": ["A2DQwen2LMHeadModel"], "model_type": kind}
        change(tmp_path, model_config=WEDLM | other)
        with refuses("adapter"):
            LLM("tiny-ar", adapter=tmp_path)
    change(tmp_path, model_config=7)
    with pytest.raises(ValueError, match="model_config"):
        LLM("tiny-ar", adapter=tmp_path)


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_published_adapters_load(family: str) -> None:
    folder = GOLDEN / f"{family}_tiny"
    adapter = GOLDEN / f"{family}_tiny_lora"
    updates = Adapter(adapter).updates
    assert len(updates) == 3 * 4 and {update.scale for update in updates.values()} == {2.0}
    merged = whole(load_model(folder, adapter=adapter), IDS, causal=False)
    assert (merged - whole(load_model(folder), IDS, causal=False)).abs().max() > 1


def test_rank_stabilized_adapters_divide_by_the_root(base: Path, adapter: Path) -> None:
    torch.manual_seed(1)
    down, up = torch.randn(2, 32), torch.randn(32, 2)
    rewrite(adapter, **{DOWN: down, UP: up})
    change(adapter, use_rslora=True)
    plain, merged = load_model(base), load_model(base, adapter=adapter)
    wanted = 3 / 2**0.5 * up @ down
    assert torch.allclose(queries(merged) - queries(plain), wanted, atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"a_later_option": {"on": True}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"r": 0},
        {"lora_alpha": "3"},
        {"lora_alpha": float("nan")},
        {"r": 8},
        {"rank_pattern": {"q_proj": 1}},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(adapter: Path, fields: dict[str, Any]) -> None:
    change(adapter, **fields)
    with pytest.raises(ValueError, match="rank 8" if fields == {"r": 8} else next(iter(fields))):
        Adapter(adapter).read_updates()
    with refuses("adapters"):
        load_adapters({"mine": adapter}, CONFIG, torch.float32)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("lm_head.weight", {"base_model.model.lm_head.weight": torch.zeros(2, 2)}),
        (f"{QUERY}.lora_B", {UP: None}),
        (f"{QUERY}.weight", {DOWN: torch.zeros(2, 48)}),
    ],
)
def test_invalid_tensors_are_refused(
    name: str, tensors: dict[str, torch.Tensor | None], base: Path, adapter: Path
) -> None:
    rewrite(adapter, **tensors)
    with pytest.raises(ValueError, match=name):
        load_model(base, adapter=adapter)


def test_separate_updates_have_their_outputs_of_stacked_layers(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "mine", CONFIG)
    updates = load_adapters({"x": folder}, CONFIG, torch.float32)["x"]
    assert len(updates) == 9  # head, and four layers in each of two blocks
    found = [update.outputs for update in updates["blocks.0.attention.qkv"]]
    assert found == [slice(0, 32), slice(32, 48), slice(48, 64)]
    keys = updates["blocks.0.attention.qkv"][1]
    published_keys = Adapter(folder).updates["model.layers.0.self_attn.k_proj.weight"]
    assert torch.allclose(keys.up @ keys.down, published_keys.compute_delta(), atol=1e-6)
    half = load_adapters({"x": folder}, CONFIG, torch.bfloat16)["x"]
    assert {each.up.dtype for each in half["unembedding"]} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.float32), (1e5, torch.float16)],
)
def test_separate_updates_that_are_not_finite_are_refused(
    adapter: Path, value: float, dtype: torch.dtype
) -> None:
    up = load_file(adapter / ADAPTER_WEIGHTS)[UP]
    up[0, 0] = 1e5
    rewrite(adapter, **{UP: up})
    load_adapters({"mine": adapter}, CONFIG, torch.float32)
    up[0, 0] = value
    rewrite(adapter, **{UP: up})
    with refuses("adapters"):
        load_adapters({"mine": adapter}, CONFIG, dtype)


@pytest.mark.parametrize(
    ("name", "outputs", "inputs"),
    [
        (QUERY, 32, 64),
        ("model.layers.7.self_attn.q_proj", 32, 32),
        ("model.embed_tokens", 24, 32),
        ("model.norm", 32, 32),
    ],
)
def test_separate_updates_of_other_modules_are_refused(
    tmp_path: Path, name: str, outputs: int, inputs: int
) -> None:
    update = LowRank(torch.ones(2, inputs), torch.ones(outputs, 2), 1.0)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    save_adapter(tmp_path, {f"{name}.weight": update}, config)
    with refuses("adapters"):
        load_adapters({"mine": tmp_path}, CONFIG, torch.float32)


@pytest.mark.parametrize(
    "adapters",
    [
        *(["a"], "a", {"": "a"}, {"\ud800": "a"}, {1: "a"}),
        *({"mine": None}, {"mine": "nowhere"}, {"mine": "."}),
    ],
    ids=ascii,
)
def test_invalid_names_and_folders_of_adapters_are_refused(
    adapters: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses("adapters"):
        LLM("tiny-ar", adapters=adapters)
