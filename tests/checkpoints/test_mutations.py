"""Damaged and foreign checkpoints: each loads correctly, or is refused with one line.

A mutation changes one thing of a tiny checkpoint that loads.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import (
    MASK,
    VOCAB,
    extending_draft,
    published,
    published_llada,
    random_model,
    save_tokenizer,
    whole,
)
from outpace.api.text import TextCodec
from outpace.checkpoints.adapter import LowRank, save_adapter
from outpace.checkpoints.checkpoint import load_tokenizer, translate_config
from outpace.checkpoints.load import load_draft, load_model, save_model
from outpace.checkpoints.tokenizer import TOKENIZER_FIELDS
from outpace.models.extending import build_draft_model
from outpace.models.transformer import Transformer
from speculator_configs import dflash, dspark, eagle

IDS = [3, 1, 4, 1, 5]
Mutation = tuple[str, str, Callable[[Path], None]]
"""The changed file, a description, and the function that changes it in a folder."""

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 2,
    "attention_factor": 1.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
EXTRA = {"rms_norm_eps": 1e-6, "eos_token_id": 1, "hidden_act": "silu", "head_dim": 8}
STATED = {"rope_theta": 1e4, "tie_word_embeddings": False, **EXTRA}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2}
THREE = {"num_hidden_layers": 3, "sliding_window": 4}
BLOCKS = {"mask_token_id": MASK, **EXTRA}
LLADA2 = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}
HYBRID = {
    **EXTRA,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
HYBRID_EXPERTS = {**HYBRID, **MIXED, "moe_intermediate_size": 16}
HYBRID_EXPERTS["shared_expert_intermediate_size"] = 12


def nested(architecture: str, **fields: Any) -> dict[str, Any]:
    inner = published(architecture, **fields)
    outer = {name: inner.pop(name) for name in ("architectures", "tie_word_embeddings")}
    return {**outer, "text_config": inner, "vision_config": {"depth": 2}, "image_token_id": 3}


GEMMA4 = {
    **THREE,
    "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e4,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
    "rope_theta": None,
}
GEMMA4_SHARED = {
    **GEMMA4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": True,
}
A2D = published("A2DQwen3LMHeadModel", model_type="a2d-qwen3", **BLOCKS)
LLADA_MOE = published(
    "LLaDAMoEModelLM",
    **MIXED,
    **{name: value for name, value in BLOCKS.items() if name != "head_dim"},
    expert_intermediate_size=16,
    moe_layer_freq=[1, 1],
    qk_layernorm=True,
    dense_intermediate_size=24,
)
del LLADA_MOE["intermediate_size"]


CONFIGS = {
    "a2d": A2D,
    "a2d_block": {**A2D, "block_size": 8},
    "dream": published("DreamModel", mask_token_id=MASK, **EXTRA),
    "efficient_dlm": published("EfficientDLM", block_size=8, **BLOCKS),
    "fast_dllm_v2": published("Fast_dLLM_QwenForCausalLM", bd_size=8, **BLOCKS),
    "llada": published_llada(),
    "llada2": published("LLaDA2MoeModelLM", **LLADA2, **BLOCKS),
    "llada_moe": LLADA_MOE,
    "llama": published(
        "LlamaForCausalLM", rope_scaling=LLAMA3, mlp_bias=True, attention_bias=True, **EXTRA
    ),
    "qwen2": published("Qwen2ForCausalLM", rope_scaling=YARN, **EXTRA),
    "qwen3": published("Qwen3ForCausalLM", attention_bias=False, **EXTRA),
    "qwen3_moe": published("Qwen3MoeForCausalLM", **MIXED, moe_intermediate_size=16, **EXTRA),
    "qwen3_5": nested("Qwen3_5ForConditionalGeneration", **HYBRID),
    "qwen3_5_moe": nested("Qwen3_5MoeForConditionalGeneration", **HYBRID_EXPERTS),
    "qwen3_5_moe_text": published("Qwen3_5MoeForCausalLM", **HYBRID_EXPERTS),
    "qwen3_5_text": published("Qwen3_5ForCausalLM", **HYBRID),
    "qwen3_next": published("Qwen3NextForCausalLM", **HYBRID_EXPERTS),
    "mistral": published("MistralForCausalLM", sliding_window=4, **STATED),
    "mixtral": published("MixtralForCausalLM", **MIXED, **STATED),
    "gemma3": published(
        "Gemma3ForCausalLM",
        **THREE,
        **{name: STATED[name] for name in ("rms_norm_eps", "tie_word_embeddings", "head_dim")},
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=12,
        rope_local_base_freq=1e3,
    ),
    "gemma4": nested("Gemma4ForConditionalGeneration", **GEMMA4_SHARED),
    "gemma4_text": published("Gemma4ForCausalLM", **GEMMA4),
    "gemma4_unified": nested("Gemma4UnifiedForConditionalGeneration", **GEMMA4),
    "gpt_oss": published(
        "GptOssForCausalLM",
        **THREE,
        **STATED,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_scaling=YARN,
    ),
    "nemotron_diffusion": published(
        "NemotronLabsDiffusionModel",
        block_size=8,
        mask_token_id=MASK,
        rope_parameters={
            **{name: YARN[name] for name in ("rope_type", "factor", "beta_fast", "beta_slow")},
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **EXTRA,
    ),
    "olmo2": published("Olmo2ForCausalLM", **STATED),
    "olmo3": published("Olmo3ForCausalLM", **THREE, **STATED, rope_scaling=YARN),
    "phi3": published("Phi3ForCausalLM", sliding_window=4, **STATED),
    "sdar": published("SDARForCausalLM", block_size=4, **BLOCKS),
    "sdar_moe": published("SDARMoeForCausalLM", **MIXED, moe_intermediate_size=16, **BLOCKS),
    "sdlm": published("SDLMQwen2ForCausalLM", text_mask_token_id=MASK, block_size=4, **EXTRA),
    "smollm3": published("SmolLM3ForCausalLM", no_rope_layers=[1, 0], **STATED),
    "stable_diffcoder": published(
        "StableDiffcoderForCausalLM", mask_token_id=MASK, attention_bias=False, **EXTRA
    ),
    "wedlm": published("WeDLMForCausalLM", mask_token_id=MASK, attention_bias=True, **EXTRA),
}
WRONG: list[Any] = [None, True, -1, 10**9, 10**30, 0.5, nan, inf, "x", [], ["x"], {"a": 1}]
"""What no field is, or few are; None takes it out."""

FOREIGN: dict[str, Any] = {
    "quantization_config": {"quant_method": "fp8"},
    "hidden_act": "gelu",
    "activation_type": "gelu",
    "partial_rotary_factor": 0.5,
    "num_experts": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "a_later_field": 1,
    "rope_scaling": {"rope_type": "longrope", "factor": 2.0},
    "rope_parameters": {"full_attention": {"rope_type": "default"}},
}
"""Fields that would change what is computed."""

BROKEN = {"cut": b'{"architectures": [', "list": b"[]", "null": b"null", "bytes": b"\xff\xfe\x00"}
BROKEN |= {"deep": b"[" * 100_000, "empty": b"", "number": b"1" * 5000}


def write_bytes(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: bool((folder / file).write_bytes(content)) and None


def change_field(file: str, keys: tuple[str, ...], value: Any) -> Callable[[Path], None]:
    """Write a JSON file with another value of a field, which may be nested; None removes it."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner.pop(keys[-1], None)
        if value is not None:
            inner[keys[-1]] = value
        (folder / file).write_text(json.dumps(content))

    return change


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / file)
        change(found)
        save_file(found, folder / file)

    return rewrite


def paths(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in content.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in paths(value))


def json_mutations(file: str, content: dict[str, Any]) -> Iterator[Mutation]:
    for keys in paths(content):
        for value in WRONG:
            yield file, f"{'.'.join(keys)}={value!r}", change_field(file, keys, value)
    for kind, content_ in BROKEN.items():
        yield file, kind, write_bytes(file, content_)


def change_last(values: Callable[[torch.Tensor], torch.Tensor], found: dict[str, Any]) -> None:
    name = sorted(found)[-1]
    found[name] = values(found[name]).contiguous()


def cut_file(file: str, size: int, folder: Path) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:size])


def tensor_mutations(file: str) -> Iterator[Mutation]:
    spoilt: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "NaN": lambda x: x.clone().index_fill(0, torch.tensor([0]), nan),
        "infinite": lambda x: x.clone().index_fill(0, torch.tensor([0]), inf),
        "int8": lambda x: x.to(torch.int8),
        "fp8": lambda x: x.to(torch.float8_e4m3fn),
        "bool": lambda x: x > 0,
        "cut rows": lambda x: x[:-1],
        "flat": lambda x: x.flatten()[:, None],
        "scalar": lambda x: x.flatten()[0],
        "none": lambda x: x[:0],
    }
    for kind, values in spoilt.items():
        yield file, kind, tensors(file, partial(change_last, values))
    for name in ("weight_scale", "x.layers.9.bias", ""):
        more = {name: torch.ones(3)}
        yield file, f"more {name!r}", tensors(file, lambda found, more=more: found.update(more))
    yield file, "fewer", tensors(file, lambda found: found.pop(sorted(found)[0]))
    yield file, "no tensors", tensors(file, lambda found: found.clear())
    for size in (0, 4, 100, -1):
        yield file, f"cut at {size}", partial(cut_file, file, size)
    yield file, "text", write_bytes(file, b"version https://git-lfs.github.com/spec/v1\n")
    yield file, "long header", write_bytes(file, (2**62).to_bytes(8, "little") + b"{}")
    yield file, "a folder", lambda folder: ((folder / file).unlink(), (folder / file).mkdir())[1]
    yield file, "missing", lambda folder: (folder / file).unlink()


def index_mutations() -> Iterator[Mutation]:
    file, weights = "model.safetensors.index.json", "model.safetensors"
    for name in ("../model.safetensors", "/etc/passwd", "", ".", "a\0b", "x" * 5000, 5, None, []):
        content = json.dumps({"weight_map": {"a": name}}).encode()
        yield file, f"names {str(name)[:20]!r}", write_bytes(file, content)
    for value in (None, [], {}, "x", 5, [weights], {"a": {"b": weights}}):
        yield file, f"is {value!r}", write_bytes(file, json.dumps({"weight_map": value}).encode())
    for kind, content in BROKEN.items():
        yield file, kind, write_bytes(file, content)
    yield file, "is config.json", write_bytes(file, b'{"weight_map": {"a": "config.json"}}')


def tokenizer_mutations(folder: Path) -> Iterator[Mutation]:
    model, settings = "tokenizer.json", "tokenizer_config.json"
    added = ("generation_config.json", "special_tokens_map.json", "added_tokens.json")
    for file in (model, settings, *added):
        for kind, content in {**BROKEN, "other": b'{"eos_token": 5}'}.items():
            yield file, kind, write_bytes(file, content)
    for file in (model, settings):
        for key in json.loads((folder / file).read_text()):
            for value in ("x", 5, [], {"a": 1}):
                yield file, f"{key}={value!r}", change_field(file, (key,), value)
    for key in TOKENIZER_FIELDS:
        for value in (*WRONG[1:], {"default": 5}, [{"name": "default"}]):
            yield settings, f"{key}: {value!r}", change_field(settings, (key,), value)
    yield model, "other vocabulary", change_field(model, ("model", "vocab"), {"a": -1})
    for chat in ("{% if", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        yield "chat_template.jinja", chat, write_bytes("chat_template.jinja", chat.encode())


def outcome(folder: Path, file: str, load: Callable[[Path], Any]) -> str:
    try:
        load(folder)
    except ValueError as error:
        message = str(error)
        named = file in message or str(folder) in message
        return "refused" if named and "\n" not in message else f"ValueError: {message}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def outcomes(
    folder: Path, mutations: Iterable[Mutation], load: Callable[[Path], Any], least: int
) -> dict[str, str]:
    load(folder / "sound")
    found = {}
    for number, (file, kind, mutate) in enumerate(mutations):
        copy = folder / str(number)
        shutil.copytree(folder / "sound", copy)
        mutate(copy)
        found[f"{file}: {kind}"[:120]] = outcome(copy, file, load)
        shutil.rmtree(copy)
    assert not {kind: end for kind, end in found.items() if end not in ("loaded", "refused")}
    assert len(found) >= least
    return found


def check_runs(model: Transformer) -> None:
    assert bool(whole(model, IDS, causal=True).isfinite().all())


def all_mutations(folder: Path) -> list[Mutation]:
    content = json.loads((folder / "sound" / "config.json").read_text())
    return [*json_mutations("config.json", content), *tensor_mutations("model.safetensors")]


def save_family(family: str, folder: Path) -> dict[str, Any]:
    save_model(random_model(CONFIGS[family]), folder / "sound", dtype=torch.float32)
    return json.loads((folder / "sound" / "config.json").read_text())


@pytest.mark.sampled
@pytest.mark.parametrize("family", CONFIGS)
def test_configurations(family: str, tmp_path: Path) -> None:
    mutations = json_mutations("config.json", save_family(family, tmp_path))
    found = outcomes(tmp_path, mutations, lambda folder: check_runs(load_model(folder)), 150)
    assert {"loaded", "refused"} == {*found.values()}


@pytest.mark.sampled
@pytest.mark.parametrize("family", CONFIGS)
def test_fields_that_change_the_model(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    partial = family == "llada2" or "linear_attention" in str(CONFIGS[family])
    own = {"partial_rotary_factor"} if partial else set()  # which is its usual one, or its value
    foreign = [
        ("config.json", name, change_field("config.json", (name,), value))
        for name, value in FOREIGN.items()
        if name not in own
    ]
    assert {*outcomes(tmp_path, foreign, load_model, len(foreign)).values()} == {"refused"}


@pytest.mark.sampled
@pytest.mark.parametrize("family", CONFIGS)
def test_weights(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    mutations = [*tensor_mutations("model.safetensors"), *index_mutations()]
    assert {*outcomes(tmp_path, mutations, load_model, 31).values()} == {"refused"}


SPECULATORS = {
    "eagle3": eagle(draft_vocab_size=20, embed_requires_grad=True, norm_before_fc=True),
    "dflash": dflash(draft_vocab_size=20, sample_from_anchor=False),
    "dspark": dspark(draft_vocab_size=20),
}


@pytest.mark.parametrize(
    "kind", ["eagle", *(pytest.param(name, marks=pytest.mark.nightly) for name in SPECULATORS)]
)
def test_drafts(kind: str, tmp_path: Path) -> None:
    target = random_model(CONFIGS["llama"])
    if kind == "eagle":
        draft = extending_draft(target, vocab_size=target.config.vocab, draft_vocab_size=20)
    else:
        draft = build_draft_model(translate_config(SPECULATORS[kind]), target)
    save_model(draft, tmp_path / "sound", dtype=torch.float32)
    mutations = all_mutations(tmp_path)
    found = outcomes(tmp_path, mutations, lambda folder: load_draft(folder, target), 100)
    assert {"loaded", "refused"} == {*found.values()}


def test_adapters(tmp_path: Path) -> None:
    save_model(random_model(CONFIGS["qwen2"]), tmp_path / "base", dtype=torch.float32)
    torch.manual_seed(0)
    update = LowRank(torch.randn(2, 32), torch.randn(32, 2), 1.5)
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "use_rslora": True,
        "bias": "none",
        "use_dora": False,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    save_adapter(tmp_path / "sound", {"model.layers.1.self_attn.q_proj.weight": update}, config)
    file = "adapter_config.json"
    mutations = [*json_mutations(file, config), *tensor_mutations("adapter_model.safetensors")]
    base = tmp_path / "base"
    found = outcomes(
        tmp_path, mutations, lambda folder: check_runs(load_model(base, adapter=folder)), 120
    )
    weights = [end for kind, end in found.items() if kind.startswith("adapter_model")]
    assert {*weights} == {"refused"} and "loaded" in found.values()


def use_tokenizer(folder: Path) -> None:
    text = TextCodec(str(folder), load_tokenizer(folder))
    if text.tokenizer is not None:
        text.decode([*text.encode("a <|im_end|>", raw=True), *text.encode("a <|im_end|>")])
        assert text.vocab_size and text.eos is not None


def test_tokenizers(tmp_path: Path) -> None:
    save_family("dream", tmp_path)
    save_tokenizer(tmp_path / "sound")
    mutations = tokenizer_mutations(tmp_path / "sound")
    found = outcomes(tmp_path, mutations, use_tokenizer, 80)
    assert {"loaded", "refused"} == {*found.values()}
