"""Gemma 4: layers of different sizes, through the engine and in every format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from adapting import write_adapter
from helpers import close, run
from outpace import LLM
from outpace.attention.by_shape import ShapedAttention
from outpace.checkpoints.load import load_config, load_model
from outpace.decoding import Forward, Sample
from outpace.engine.runner import Runner
from outpace.models.split import ModelShard
from outpace.training.weights import check_trainable
from refusal import refuses

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "final_logit_softcapping": 3.0,
    "max_position_embeddings": 256,
}
DENSE = {
    "num_hidden_layers": 3,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": [SLIDING, SLIDING, FULL],
}
MODELS: dict[str, dict[str, Any]] = {
    "31B": DENSE,
    "31B, wide": {**DENSE, "global_head_dim": 512},
    "26B-A4B": {
        **DENSE,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "E2B": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    },
}
IDS = [3, 61, 27, 52, 14, 9, 40, 8, 61, 0, 33, 12] * 3


def written(name: str, folder: Path) -> Gemma4ForCausalLM:
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**{**SIZES, **MODELS[name]})).eval()
    for part in model.state_dict().values():
        torch.nn.init.normal_(part, mean=0.0 if part.dim() > 1 else 0.7, std=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_the_engine(name: str, tmp_path: Path) -> None:
    with torch.inference_mode():
        expected = written(name, tmp_path)(torch.tensor([IDS])).logits[0]
    each = Runner(name, load_model(tmp_path), slots=256)
    assert isinstance(each.backend, ShapedAttention)
    for cut, rejected in ((20, 3), (0, 0), (0, 3)):
        table = each.reserve(len(IDS) + rejected)
        assert table is not None
        for slot in range(cut, len(IDS)):
            start = 0 if slot == cut else slot
            ids = [*IDS[start : slot + 1], *[slot % 40] * rejected]
            read = Sample(keep=True)
            forward = Forward(ids=ids, start=start, predict=[slot + 1], read=read)
            (out,) = run(each, [forward], [table])
            assert out.logits is not None
            close(out.logits[0], expected[slot])


@pytest.mark.parametrize("name", MODELS)
def test_layers_have_memory_of_their_own_shape(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    each = Runner(name, load_model(tmp_path), slots=256)
    kinds, model = MODELS[name]["layer_types"], MODELS[name]
    own = kinds[: len(kinds) - model.get("num_kv_shared_layers", 0)]
    heads = model.get("num_global_key_value_heads", 2)
    size = model.get("global_head_dim", 32)
    shapes = [(heads, size) if kind == FULL else (2, 16) for kind in own]
    assert [tuple(keys.shape[1:]) for keys in each.cache.keys] == shapes
    assert [tuple(values.shape[1:]) for values in each.cache.values] == shapes
    slots = sum(memory[0, 0, :, 0, 0].numel() for memory in each.cache.memories)
    assert slots == 256 * len({*shapes})
    table = each.reserve(64)
    assert table is not None
    each.cache.extend(table, 64)
    for part in (*each.cache.keys, *each.cache.values):
        part[table.slots] = 1.0
    each.cache.copy_pages([table.pages[0]], [table.pages[0] + 8])
    each.release(table, zero=True)
    for part in (*each.cache.keys, *each.cache.values):
        assert part[table.slots].count_nonzero() == 0
        assert part.count_nonzero() == part[0].numel() * 16


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_quantized_together_equals_alone(name: str, quantize: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    prompts = [IDS, IDS[:5], IDS[:20]]
    llm = LLM(tmp_path, cache_gib=0.01, quantize=quantize)
    together = llm.generate(prompts, max_tokens=16, ignore_eos=True)
    alone = [llm.generate(ids, max_tokens=16, ignore_eos=True)[0] for ids in prompts]
    assert [out.ids for out in together] == [out.ids for out in alone]


@pytest.mark.parametrize("name", ["26B-A4B", "E2B"])
def test_adapter_of_a_request_equals_a_merged_one(name: str, tmp_path: Path) -> None:
    written(name, tmp_path / "base")
    parts = "attention", "mlp.gate_up", "dense", "layer_gate", "projection"
    config = load_config(tmp_path / "base")
    folder = write_adapter(tmp_path / "lora", config, size=0.1, parts=parts)
    llm = LLM(tmp_path / "base", cache_gib=0.01, adapters={"own": folder})
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    pending = [llm.submit(IDS, adapter=adapter, **options) for adapter in (None, "own")]
    for _ in range(2 * options["max_tokens"]):
        llm.driver.step()
    plain, own = (answer.build_output() for answer in pending)
    merged = LLM(tmp_path / "base", cache_gib=0.01, adapter=folder)
    assert own.ids == merged.generate(IDS, **options)[0].ids != plain.ids


def test_keys_of_layers_that_share_are_not_read(tmp_path: Path) -> None:
    written("E2B", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{part}.weight"] = torch.ones(3)
    save_file(tensors, file)
    load_model(tmp_path)
    tensors["model.layers.5.self_attn.v_norm.weight"] = torch.ones(3)
    save_file(tensors, file)
    with pytest.raises(ValueError, match="model.layers.5.self_attn.v_norm"):
        load_model(tmp_path)


def test_what_is_not_available(tmp_path: Path) -> None:
    written("31B", tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel"):
        ModelShard(0, 2).shard_config(model.config)
    with pytest.raises(ValueError, match="Gemma4ForCausalLM"):
        check_trainable(model.config)
    with refuses("graphs"):
        LLM(tmp_path, cache_gib=0.01, graphs=True)
