"""Configurations of drafts as the library speculators writes them."""

from typing import Any

from helpers import VOCAB

LAYER, LISTED = "transformer_layer_config", "aux_hidden_state_layer_ids"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 160,
    "mlp_bias": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def wrapped(kind: str, layer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    name = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}[kind]
    return {
        "architectures": [f"{name}DraftModel"],
        "auto_map": {"": f"{'eagle3' if kind == 'eagle3' else 'config'}.{name}SpeculatorConfig"},
        "base_model_ep_plan": None,
        "draft_vocab_size": VOCAB,
        "dtype": "float32",
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["Qwen2ForCausalLM"], "name_or_path": "some/target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        LAYER: {**SIZES, **layer},
        **changes,
    }


def eagle(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    fields = {"model_type": "llama", "num_hidden_layers": 1, **(layer or {})}
    own = {f"eagle_{LISTED}": [1, 2], "embed_requires_grad": False, "norm_before_residual": False}
    return wrapped("eagle3", fields, **{**own, **changes})


def dflash(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    fields = {"model_type": "qwen3", "num_hidden_layers": 2, **(layer or {})}
    own = {LISTED: [1, 2], "mask_token_id": VOCAB - 1, "block_size": 4}
    return wrapped("dflash", fields, **{**own, **changes})


def dspark(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    heads = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
    heads |= {"confidence_head_with_markov": True, "sample_from_anchor": True}
    return dflash(
        layer, **{**wrapped("dspark", {}), LAYER: dflash(layer)[LAYER], **heads, **changes}
    )
