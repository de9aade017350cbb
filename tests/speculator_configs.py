"""Drafts as the library speculators writes them: configurations, tables and folders."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers import VOCAB

WEIGHTS = "model.safetensors"
SOME = [1, 2, 5, 6, 7, 9, 12, 13, 14, 15, 17, 20, 22, 23]
"""Tokens of a reduced vocabulary."""
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


def dflash(
    layer: dict[str, Any] | None = None, kind: str = "dflash", **changes: Any
) -> dict[str, Any]:
    fields = {"model_type": "qwen3", "num_hidden_layers": 2, **(layer or {})}
    own = {LISTED: [1, 2], "mask_token_id": VOCAB - 1, "block_size": 4}
    return wrapped(kind, fields, **{**own, **changes})


def dspark(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    heads = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
    heads |= {"confidence_head_with_markov": True, "sample_from_anchor": True}
    return dflash(layer, "dspark", **{**heads, **changes})


def tables(tokens: list[int]) -> dict[str, Tensor]:
    is_kept = torch.zeros(VOCAB, dtype=torch.bool)
    is_kept[tokens] = True
    return {"d2t": torch.tensor(tokens) - torch.arange(len(tokens)), "t2d": is_kept}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: part.contiguous() for name, part in tensors.items()}, folder / WEIGHTS)
    return folder
