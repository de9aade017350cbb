"""LLaDA: Llama, bidirectional and not shifted, with OLMo's tensor names (Nie et al., 2025)."""

from __future__ import annotations

from operator import itemgetter

from outpace.checkpoints.families.family import EOS, IGNORABLE, Family, TensorNames, head_dim
from outpace.checkpoints.families.llada_gguf import LLADA_GGUF, LLADA_STATED
from outpace.checkpoints.fields import Field, Fields, count, few, field, flag, group, index, number
from outpace.decoding.target import Kind
from outpace.models.config import Rope

EOT = 126348  # `<|eot_id|>` ends the assistant's turn; config.json has only the end of text
BLOCK_NAME = "model.transformer.blocks.{}."
LLADA_NAMES: TensorNames = {
    "embedding.weight": "model.transformer.wte.weight",
    "blocks.{}.attention_norm.weight": f"{BLOCK_NAME}attn_norm.weight",
    "blocks.{}.attention.qkv.weight": tuple(f"{BLOCK_NAME}{part}_proj.weight" for part in "qkv"),
    "blocks.{}.attention.qkv.bias": tuple(f"{BLOCK_NAME}{part}_proj.bias" for part in "qkv"),
    "blocks.{}.attention.out.weight": f"{BLOCK_NAME}attn_out.weight",
    "blocks.{}.mlp_norm.weight": f"{BLOCK_NAME}ff_norm.weight",
    "blocks.{}.mlp.gate_up.weight": (f"{BLOCK_NAME}ff_proj.weight", f"{BLOCK_NAME}up_proj.weight"),
    "blocks.{}.mlp.down.weight": f"{BLOCK_NAME}ff_out.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "unembedding.weight": "model.transformer.ff_out.weight",
}

MORE_IGNORED = "alibi_bias_max attention_layer_norm_with_affine flash_attention init_cutoff_factor"
MORE_IGNORED += " init_device init_fn init_std mlp_ratio precision"

LLADA_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}<|startoftext|>{% endif %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ROTARY = {"theta": field("rope_theta", number), "float32": field("rope_full_precision", flag, True)}


def end_tokens(published: Fields, ours: Fields) -> tuple[int, ...]:
    """Return the tokens that end an answer."""
    return (*EOS.read(published, ours), *((EOT,) if ours["vocab"] > EOT else ()))


LLADA = Family(
    name="llada",
    about="LLaDA: a diffusion model trained from scratch, bidirectional, not shifted",
    architectures=("LLaDAModelLM",),
    checkpoints=("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"),
    compared="recorded runs of its authors' code",
    fields={
        "vocab": field("embedding_size vocab_size", count),
        "dim": field("d_model", count),
        "layers": field("n_layers", few),
        "heads": field("n_heads", few),
        "kv_heads": field("n_kv_heads", few, itemgetter("heads")),
        "head_dim": head_dim,
        "mlp": field("mlp_hidden_size", count),
        "max_length": field("max_sequence_length", count),
        "norm_eps": field("rms_norm_eps", number),
        "rope": group(Rope, ROTARY),
        "qkv_bias": field("include_qkv_bias", flag, False),
        "tied": field("weight_tying", flag),
        "shift": 0,
        "kind": Kind.DIFFUSION,
        "block": 32,
        "null_prompt": True,
        "mask_id": field("mask_token_id", index),
        "eos": Field(EOS.names, end_tokens),
    },
    fixed={},
    stated=LLADA_STATED,
    ignored=IGNORABLE | {*MORE_IGNORED.split()},
    remote={"configuration_llada.LLaDAConfig", "modeling_llada.LLaDAModelLM"},
    names=LLADA_NAMES,
    method="left_to_right",
    template=LLADA_TEMPLATE,
    gguf=LLADA_GGUF,
)
