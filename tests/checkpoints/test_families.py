"""Every family's logits equal those of transformers, from checkpoints that transformers wrote."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers import published, whole
from outpace import LLM
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.load import load_config, load_model
from outpace.methods import METHODS, Speculative
from outpace.models.attention import rotary_frequencies

LENGTH = {"min_new_tokens": 24, "max_new_tokens": 24}
IDS = [3, 61, 27, 52, 14, 9, 40, 8, 61, 0, 33, 12] * 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500_000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
GEMMA = {**SIZES, **KINDS, "head_dim": 16}
SIX = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA4 = {
    **GEMMA,
    "num_hidden_layers": 3,
    "layer_types": SIX[:3],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
GEMMA4_SHARED = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": SIX,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
OSS = {
    **KINDS,
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MANY = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12}
EIGHT = {"num_experts_per_tok": 3, "num_local_experts": 8}
PLAIN = {"rope_type": "default", "rope_theta": 500_000.0}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
SHARED = {**MANY, "shared_expert_intermediate_size": 20}
DELTA = {
    **SIZES,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {**LOCAL, "partial_rotary_factor": 0.5},
}
SEES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
IMAGES = {"vision_config": {**SEES, "out_hidden_size": 48}}
MROPE = {"rope_parameters": {**DELTA["rope_parameters"], "mrope_section": [2, 1, 1]}}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}


Model = tuple[type[PreTrainedModel], Any]


def causal(kind: str, config: str = "", **fields: Any) -> Model:
    make = getattr(hf, f"{config or kind}Config")
    return getattr(hf, f"{kind}ForCausalLM"), make(**{**SIZES, **fields})


def nested(kind: str, **fields: Any) -> Model:
    return getattr(hf, f"{kind}ForConditionalGeneration"), getattr(hf, f"{kind}Config")(**fields)


SCALED_GEMMA = {
    "full_attention": {**PLAIN, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": LOCAL,
}
OLMO_YARN = {"full_attention": YARN, "sliding_attention": PLAIN}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MODELS: dict[str, Model] = {
    "qwen2": causal("Qwen2", **UNTIED),
    "qwen2-tied": causal("Qwen2", **TIED),
    "qwen2-yarn": causal("Qwen2", rope_parameters=YARN),
    "qwen3": causal("Qwen3", head_dim=16, **UNTIED),
    "qwen3-wide-heads": causal("Qwen3", head_dim=32),
    "qwen3-biased": causal("Qwen3", head_dim=16, attention_bias=True),
    "llama": causal("Llama"),
    "llama-biased": causal("Llama", attention_bias=True, mlp_bias=True),
    "llama-llama3": causal("Llama", rope_parameters=LLAMA3),
    "llama-linear": causal("Llama", rope_parameters=LINEAR),
    "llama-yarn": causal("Llama", rope_parameters=YARN),
    "mistral": causal("Mistral", sliding_window=None),
    "mistral-window": causal("Mistral", sliding_window=7),
    "mixtral": causal("Mixtral", **EIGHT),
    "mixtral-window": causal("Mixtral", **EIGHT, sliding_window=5),
    "gemma3": causal("Gemma3", "Gemma3Text", **GEMMA, query_pre_attn_scalar=16),
    "gemma3-scaled": causal(
        *("Gemma3", "Gemma3Text"),
        **{**GEMMA, **UNTIED, "query_pre_attn_scalar": 21, "rope_parameters": SCALED_GEMMA},
    ),
    "gemma4": nested("Gemma4", text_config=GEMMA4_SHARED),
    "gemma4_unified": nested("Gemma4Unified", text_config=GEMMA4),
    "gpt_oss": causal("GptOss", **OSS, rope_parameters={**YARN, "truncate": False}),
    "olmo2": causal("Olmo2"),
    "olmo3": causal("Olmo3", num_hidden_layers=4, sliding_window=7),
    "olmo3-yarn": causal("Olmo3", **KINDS, rope_parameters=OLMO_YARN),
    "phi3": causal("Phi3", **TOKENS),
    "phi3-window": causal("Phi3", **TOKENS, sliding_window=9),
    "qwen3_moe": causal("Qwen3Moe", **MANY, norm_topk_prob=True),
    "qwen3_moe-shares": causal("Qwen3Moe", **MANY),
    "qwen3_5": nested("Qwen3_5", text_config={**DELTA, **MROPE, "head_dim": 16}, **IMAGES),
    "qwen3_5_moe": nested("Qwen3_5Moe", text_config={**DELTA, **SHARED}, **IMAGES),
    "qwen3_5_moe_text": causal("Qwen3_5Moe", "Qwen3_5MoeText", **DELTA, **SHARED),
    "qwen3_5_text": causal("Qwen3_5", "Qwen3_5Text", **DELTA, head_dim=16),
    "qwen3_5_text-tied": causal(
        *("Qwen3_5", "Qwen3_5Text"),
        **{**DELTA, **TIED, "layer_types": DELTA["layer_types"][::-1], "head_dim": 16},
    ),
    "qwen3_next": causal("Qwen3Next", **DELTA, **SHARED),
    "smollm3": causal("SmolLM3", **TOKENS, num_hidden_layers=4),
    "smollm3-untied": causal("SmolLM3", **TOKENS, no_rope_layers=[0, 1], **UNTIED),
}


def random_weights(name: str) -> PreTrainedModel:
    """Return a transformers model with weights large enough for every part to matter."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() >= 2 else 0.5, std=0.2)
    for name_, buffer in model.named_buffers():
        if name_.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=0.7, std=0.2)
    model.tie_weights()
    return model


@torch.inference_mode()
def reference(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_weights(name)
    theirs.save_pretrained(tmp_path)
    ours = whole(load_model(tmp_path), IDS, causal=True)
    torch.testing.assert_close(ours, reference(theirs), atol=2e-4, rtol=2e-4)
    assert load_config(tmp_path).family == name.partition("-")[0]


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_weights(name)
    theirs.save_pretrained(tmp_path)
    llm = LLM(tmp_path, cache_gib=0.01)
    outputs = llm.generate([IDS, IDS[:5]], max_tokens=24, ignore_eos=True)
    speculative = Speculative(draft=str(tmp_path))
    again = llm.generate(IDS, method=speculative, max_tokens=24, ignore_eos=True)[0]
    for prompt, output in [(IDS, outputs[0]), (IDS[:5], outputs[1]), (IDS, again)]:
        ids = torch.tensor([prompt])
        whole = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=-1, **LENGTH
        )
        assert list(output.ids) == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "mixtral", "gemma3", "gpt_oss"])
def test_shards_are_read_as_one(name: str, tmp_path: Path) -> None:
    theirs = random_weights(name)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ours = whole(load_model(tmp_path), IDS, causal=True)
    torch.testing.assert_close(ours, reference(theirs), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_experts_in_one_tensor_are_equivalent(name: str, tmp_path: Path) -> None:
    theirs = random_weights(name)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    stacks: dict[str, list[torch.Tensor]] = {}
    for layer in sorted({key.partition(".experts.")[0] for key in tensors if ".experts." in key}):
        for expert in range(MANY["num_experts"]):
            gate, up, down = (
                tensors.pop(f"{layer}.experts.{expert}.{part}_proj.weight")
                for part in ("gate", "up", "down")
            )
            stacks.setdefault(f"{layer}.experts.gate_up_proj", []).append(torch.cat((gate, up)))
            stacks.setdefault(f"{layer}.experts.down_proj", []).append(down)
    tensors |= {stack: torch.stack(parts) for stack, parts in stacks.items()}
    tensors["mtp.norm.weight"] = torch.ones(48)
    save_file(tensors, file, metadata={"format": "pt"})
    ours = whole(load_model(tmp_path), IDS, causal=True)
    torch.testing.assert_close(ours, reference(theirs), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["qwen2-yarn", "llama-llama3", "llama-linear"])
def test_old_format_of_rotary_fields_is_equivalent(name: str, tmp_path: Path) -> None:
    random_weights(name).save_pretrained(tmp_path)
    new = whole(load_model(tmp_path), IDS, causal=True)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {**scaling, "type": scaling.pop("rope_type")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(whole(load_model(tmp_path), IDS, causal=True), new)


@pytest.mark.parametrize(
    "own", [{}, {"beta_fast": 24, "beta_slow": 2}, {"attention_factor": 1.5}], ids=str
)
def test_yarn_rotates_large_heads_as_transformers_does(own: dict[str, float]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **own}
    config = hf.Qwen3Config(
        head_dim=128, max_position_embeddings=131072, rope_parameters={**yarn, "rope_theta": 1e6}
    )
    theirs, attention = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = translate_config(published("Qwen3ForCausalLM", rope_theta=1e6, rope_scaling=yarn)).rope
    ours, factor = rotary_frequencies(rope, 128)
    torch.testing.assert_close(ours.float(), theirs, atol=0, rtol=1e-5)
    assert factor == pytest.approx(attention)


def test_the_table_of_families_is_the_registry() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()
    table = text[text.index("| family |") :].split("\n\n")[0].splitlines()[2:]
    rows = {}
    for line in table:
        name, architectures, _, _, method = line.strip("| ").split(" | ")
        rows[name.strip("`")] = (*re.findall(r"`(\w+)`", architectures), method)
    expected = {}
    for name, family in FAMILIES.items():
        is_draft = name.partition("_")[0] in ("dflash", "dflash2", "dspark", "eagle")
        method = "a [draft](#drafts)" if is_draft else f"`{METHODS[family.method].__name__}`"
        expected[name] = (*family.architectures, method)
    assert rows == expected
