"""GGUF files of each family, as llama.cpp's converter writes them, compared with transformers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)
from torch import Tensor

from helpers import close, whole
from outpace.checkpoints.compress import compress_checkpoint
from outpace.checkpoints.load import load_config, load_model

TYPES = GGMLQuantizationType
SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
Named = Iterator[tuple[str, Tensor]]
IDS = [5, 3, 1, 4, 40, 7, 9, 30, 22, 11, 6, 2, 19, 33, 47, 8, 12, 13, 28, 21]


def unchanged(config: Any, name: str, tensor: Tensor) -> Named:
    yield name, tensor


def paired(config: Any, name: str, tensor: Tensor) -> Named:
    """Queries and keys have the two halves of a head's rotary dimensions interleaved."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        key = name.endswith("k_proj.weight")
        heads = config.num_key_value_heads if key else config.num_attention_heads
        tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def shifted(config: Any, name: str, tensor: Tensor) -> Named:
    """Gemma's norms have the 1 that its code adds."""
    if name != "lm_head.weight":
        yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def mixed(config: Any, name: str, tensor: Tensor) -> Named:
    """Mixtral's experts are stacked, gate and up apart."""
    stem = name.replace("mlp.experts.", "block_sparse_moe.experts.")
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        yield stem.replace("gate_up_proj", "w1.weight"), gate
        yield stem.replace("gate_up_proj", "w3.weight"), up
    elif name.endswith("experts.down_proj"):
        yield stem.replace("down_proj", "w2.weight"), tensor
    else:
        yield from paired(config, name, tensor)


def alternating(config: Any, name: str, tensor: Tensor) -> Named:
    """Experts of gpt-oss are transposed, and gate and up do not alternate."""
    if "gate_up_proj" in name:
        kind = "bias" if name.endswith("_bias") else "weight"
        if kind == "weight":
            tensor = tensor.transpose(1, 2)
        stem = name.partition("gate_up_proj")[0]
        yield f"{stem}gate_proj.{kind}", tensor[:, ::2]
        yield f"{stem}up_proj.{kind}", tensor[:, 1::2]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.transpose(1, 2)
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), tensor
    else:
        yield (f"{name}.weight" if name.endswith("sinks") else name), tensor


def spread_heads(config: Any, tensor: Tensor) -> Tensor:
    """The first value heads of all key heads come first, then the second ones."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = tensor.reshape(keys, values // keys, -1, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def recurrent(config: Any, name: str, tensor: Tensor) -> Named:
    """Decays are negative, the convolution has two dimensions, most norms have the 1 added."""
    stem, _, end = name.rpartition("linear_attn.")
    if end == "A_log":
        tensor = -tensor.exp()
    elif end == "dt_bias":
        name = f"{stem}linear_attn.dt_proj.bias"
    elif end == "conv1d.weight":
        tensor = tensor.squeeze(1)
    elif name.endswith("norm.weight") and end != "norm.weight":
        tensor = tensor + 1
    if name.endswith("experts.gate_up_proj"):
        for kind, part in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
            yield name.replace("gate_up_proj", f"{kind}_proj.weight"), part
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def spread(config: Any, name: str, tensor: Tensor) -> Named:
    """Value heads of Qwen3.5 are spread: rows of projections, and columns of the last one."""
    end = name.rpartition("linear_attn.")[2]
    if end in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        tensor = torch.cat((tensor[:before], spread_heads(config, tensor[before:])))
    elif end.startswith(("in_proj", "A_log", "dt_bias")):
        tensor = spread_heads(config, tensor)
    elif end == "out_proj.weight":
        tensor = spread_heads(config, tensor.T).T
    yield from recurrent(config, name, tensor)


def ungrouped(config: Any, name: str, tensor: Tensor) -> Named:
    """A projection of Qwen3-Next has all queries, keys and values, another one the gates."""
    if not name.endswith("in_proj_qkvz.weight"):
        yield from recurrent(config, name, tensor)
        return
    each = config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [each * config.linear_value_head_dim] * 2
    grouped = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1])
    *qkv, z = (part.flatten(0, 1) for part in grouped.split(sizes, 1))
    yield name.replace("qkvz", "qkv"), torch.cat(qkv)
    yield name.replace("qkvz", "z"), z


Convert = Callable[[Any, str, Tensor], Named]


@dataclass(frozen=True)
class Case:
    """A family: transformers' model, llama.cpp's architecture, and what its converter writes."""

    model: str
    arch: MODEL_ARCH
    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    convert: Convert = unchanged
    metadata: dict[str, Any] = field(default_factory=dict)
    """Methods of the writer and their arguments: one, or a tuple."""


WINDOW = {"add_sliding_window": 8}
# As the larger models: the other layers are scaled, and 10,000 is not written.
LINEAR = {"add_rope_scaling_type": RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0}
# Without what llama.cpp has no name for.
SCALED = {
    "add_rope_scaling_type": RopeScalingType.YARN,
    "add_rope_scaling_factor": YARN["factor"],
    "add_rope_scaling_orig_ctx_len": YARN["original_max_position_embeddings"],
    "add_rope_scaling_yarn_beta_fast": YARN["beta_fast"],
    "add_rope_scaling_yarn_beta_slow": YARN["beta_slow"],
}
OLMO3 = {
    "add_rope_scaling_yarn_attn_factor": 1.2,
    "add_rope_freq_base_swa": YARN["rope_theta"],
    "add_sliding_window_pattern": [True, False, True, True],
}


def recurrent_metadata(arch: str) -> dict[str, Any]:
    experts = {
        "add_expert_count": 4,
        "add_expert_used_count": 2,
        "add_expert_feed_forward_length": 32,
        "add_expert_shared_feed_forward_length": 96,
    }
    return {
        "add_ssm_conv_kernel": 4,
        "add_ssm_state_size": 16,
        "add_ssm_group_count": 2,
        "add_ssm_time_step_rank": 6,
        "add_ssm_inner_size": 96,
        "add_rope_dimension_count": 8,
        "add_rope_dimension_sections": [2, 1, 1, 0],
        "add_array": (f"{arch}.attention.recurrent_layers", [True, False, True, True]),
        **({} if arch == "qwen35" else experts),
    }


def write_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    for name, value in metadata.items():
        getattr(writer, name)(*(value if isinstance(value, tuple) else (value,)))


def gemma_fields(theta: float, **full: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": 7,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
GPT_OSS = {
    **SIZES,
    "intermediate_size": 64,
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {**YARN, "truncate": False},
}
RECURRENT = {
    "head_dim": 16,
    "layer_types": [f"{'full' if n == 1 else 'linear'}_attention" for n in range(4)],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 0.5},
}
SHARED = {
    **RECURRENT,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
}
LAYERS = [f"{'full' if layer == 1 else 'sliding'}_attention" for layer in range(4)]
OLMO3_ROPE = {
    "full_attention": {**YARN, "attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OPEN, NARROW = {**ROPE, "sliding_window": None}, {**ROPE, "sliding_window": 8}
ARCH = MODEL_ARCH
ENTRIES: dict[str, tuple[Any, ...]] = {
    "gemma3": (
        *("Gemma3", ARCH.GEMMA3, "gemma3", gemma_fields(500.0), shifted),
        {**WINDOW, "add_rope_freq_base_swa": 500.0},
    ),
    "gemma3 scaled": (
        *("Gemma3", ARCH.GEMMA3, "gemma3"),
        *(gemma_fields(1e4, rope_type="linear", factor=8.0), shifted, {**WINDOW, **LINEAR}),
    ),
    "mistral3": ("Mistral", ARCH.MISTRAL3, "mistral", {**OPEN, "head_dim": 32}, paired),
    "mistral as llama": ("Mistral", ARCH.LLAMA, "llama", OPEN, paired),
    "mixtral": ("Mixtral", ARCH.LLAMA, "mixtral", {**ROPE, **EXPERTS}, mixed),
    "phi3": (
        *("Phi3", ARCH.PHI3, "phi3", NARROW, unchanged),
        {**WINDOW, "add_rope_scaling_orig_ctx_len": 160},
    ),
    "phi3 open": ("Phi3", ARCH.PHI3, "phi3", OPEN, unchanged, {"add_sliding_window": 0}),
    "olmo2": ("Olmo2", ARCH.OLMO2, "olmo2", ROPE),
    "olmo3": (
        *("Olmo3", ARCH.OLMO2, "olmo3"),
        {"sliding_window": 8, "layer_types": LAYERS, "rope_parameters": OLMO3_ROPE},
        *(unchanged, {**SCALED, **WINDOW, **OLMO3}),
    ),
    "qwen3.5": (
        *("Qwen3_5", ARCH.QWEN35, "qwen3_5_text"),
        *(RECURRENT, spread, recurrent_metadata("qwen35")),
    ),
    "qwen3.5 experts": (
        *("Qwen3_5Moe", ARCH.QWEN35MOE, "qwen3_5_moe_text"),
        *(SHARED, spread, recurrent_metadata("qwen35moe")),
    ),
    "qwen3-next": (
        *("Qwen3Next", ARCH.QWEN3NEXT, "qwen3_next"),
        *(SHARED, ungrouped, recurrent_metadata("qwen3next")),
    ),
    "smollm3": ("SmolLM3", ARCH.SMOLLM3, "smollm3", ROPE, paired),
    "gpt-oss": (
        *("GptOss", ARCH.GPT_OSS, "gpt_oss", GPT_OSS, alternating),
        {**SCALED, **WINDOW, "add_expert_feed_forward_length": 64},
    ),
}


CASES = {name: Case(*entry) for name, entry in ENTRIES.items()}


def random_model(case: Case) -> Any:
    """Return transformers' model with random weights, large enough that its outputs vary."""
    settings = {**SIZES, **case.fields}
    centred = case.model == "Gemma3" or case.model.startswith("Qwen3")
    kind = case.model + "Text" * (centred and case.model != "Qwen3Next")
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{case.model}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        norm = name.endswith("norm.weight")
        centre = norm and (not centred or name.endswith("linear_attn.norm.weight"))
        torch.nn.init.normal_(parameter, float(centre), 0.2 if norm else 0.3)
    return model.requires_grad_(False)


def write_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(0)
    if (size := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)
    if experts := getattr(config, "num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def write_file(path: Path, case: Case, kinds: dict[str, TYPES] | None = None) -> tuple[Path, Any]:
    """Write a file of a random model; return also the model, with what its types leave of it."""
    model = random_model(case)
    config = model.config
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[case.arch])
    write_sizes(writer, config)
    write_metadata(writer, case.metadata)
    names = get_tensor_name_map(case.arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        for published, part in [] if tied else case.convert(config, name, tensor):
            stem, _, end = published.rpartition(".")
            own = names.get_name(published) or f"{names.get_name(stem)}.{end}"
            assert not own.startswith("None"), published
            data = part.contiguous().numpy()
            kind = next((kind for key, kind in (kinds or {}).items() if key in own), None)
            if kind is None or end == "bias":
                writer.add_tensor(own, data)
                continue
            quantized = quants.quantize(data, kind)
            writer.add_tensor(own, quantized, raw_dtype=kind)
            part.copy_(torch.from_numpy(quants.dequantize(quantized, kind).copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def check_logits(path: Path, model: Any, **options: Any) -> None:
    wanted = model(torch.tensor([IDS])).logits[0]
    assert wanted.std() > 0.5
    close(whole(load_model(path, **options), IDS, causal=True), wanted)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path, model = write_file(tmp_path / "model.gguf", CASES[name])
    assert load_config(path).family == CASES[name].family
    check_logits(path, model)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt-oss"])
def test_an_int8_folder_of_a_file_loads(name: str, tmp_path: Path) -> None:
    path, model = write_file(tmp_path / "model.gguf", CASES[name])
    folder = compress_checkpoint(path, tmp_path / "small")
    one, other = load_model(path, quantize="int8"), load_model(folder, quantize="int8")
    assert torch.equal(*(whole(each, IDS, causal=True) for each in (one, other)))
    theirs = transformers.AutoConfig.from_pretrained(folder)
    kind = "llama" if CASES[name].family == "llama" else model.config.model_type
    assert theirs.model_type == kind


def test_experts_in_mxfp4_are_exact(tmp_path: Path) -> None:
    path, model = write_file(tmp_path / "model.gguf", CASES["gpt-oss"], {"_exps": TYPES.MXFP4})
    check_logits(path, model)


def write_more(folder: Path, name: str, metadata: dict[str, Any]) -> tuple[Path, Any]:
    case = CASES[name]
    changed = replace(case, metadata=case.metadata | metadata)
    return write_file(folder / "model.gguf", changed)


def test_layers_that_predict_several_tokens_are_not_read(tmp_path: Path) -> None:
    part = "blk.4.nextn.eh_proj.weight", torch.ones(64, 128).numpy()
    more = {"add_block_count": 5, "add_nextn_predict_layers": 1, "add_tensor": part}
    check_logits(*write_more(tmp_path, "qwen3.5", more))


def test_each_end_token_of_a_file_ends_an_answer(tmp_path: Path) -> None:
    ends = {"add_eos_token_id": 7, "add_eot_token_id": 5, "add_eom_token_id": 9}
    path, _ = write_more(tmp_path, "olmo2", ends)
    assert load_config(path).eos == (5, 7, 9)


FACTORS = torch.ones(8).numpy()
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("gemma3", "final_logit_softcapping", {"add_final_logit_softcapping": 30.0}),
    ("olmo2", "rms_epsilon must be", {"add_layer_norm_rms_eps": float("nan")}),
    ("olmo2", "rms_epsilon must be", {"add_layer_norm_rms_eps": float("inf")}),
    ("mistral3", "temperature_scale", {"add_attn_temperature_scale": 0.1}),
    ("mistral3", "yarn_log_multiplier", {"add_rope_scaling_yarn_log_mul": 1.0}),
    ("phi3", "dimension_count", {"add_rope_dimension_count": 12}),
    ("phi3", "rope_factors", {"add_tensor": ("rope_factors_long.weight", FACTORS)}),
    ("olmo3", "freq_base_swa", {"add_rope_freq_base": 7.0}),
    ("olmo2", "full_attention", {"add_sliding_window_pattern": [True] * 4}),
    ("smollm3", "shift_logits", {"add_bool": ("diffusion.shift_logits", True)}),
    ("gpt-oss", "expert_group_count", {"add_expert_group_count": 2}),
    ("qwen3.5", "inner_size", {"add_ssm_inner_size": 97}),
    ("qwen3.5", "5 heads", {"add_ssm_time_step_rank": 5}),
    ("qwen3.5", "partial_rotary_factor", {"add_rope_dimension_count": 7}),
    ("qwen3.5", "dt_b_c_rms", {"add_ssm_dt_b_c_rms": True}),
    ("qwen3.5", "num_hidden_layers", {"add_nextn_predict_layers": 4}),
    ("qwen3.5", "nextn", {"add_string": ("qwen35.nextn_predict_layers", "one")}),
    ("qwen3.5", "layers", {"add_array": ("qwen35.attention.recurrent_layers", [0, 2, 1, 1])}),
]


@pytest.mark.parametrize(("name", "field", "metadata"), REFUSED, ids=range(len(REFUSED)))
def test_unsupported_metadata_are_refused(
    name: str, field: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = write_more(tmp_path, name, metadata)
    with pytest.raises(ValueError, match=field) as error:
        load_model(path)
    assert str(path) in str(error.value)
