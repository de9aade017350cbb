"""LLaDA's GGUF files, and the published fields that they leave out."""

from __future__ import annotations

from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.families.gguf_orders import PAIRED_ROWS

LLADA_STATED = {
    "activation_type": "silu",
    "block_group_size": 1,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
}
"""Fields with only one supported value."""

LLADA_GGUF = GGUFFormat(
    architecture="llada",
    renamed={
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
        "tie_word_embeddings": "weight_tying",
    },
    stated={"attention.causal": False, "diffusion.shift_logits": False},
    implied=LLADA_STATED,
    rows=PAIRED_ROWS,
)
