"""Tiny models of transformers with random weights, saved in the format of another family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

import naive

VOCAB, MASK, IDS = 64, 63, [3, 61, 27, 52, 14, 9, 40, 8, 61, 0, 33, 12, 7, 5, 44, 21, 2] * 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "eos_token_id": 1,
}

Disguise = tuple[type[PreTrainedModel], PreTrainedConfig, dict[str, Any]]
"""Class and configuration in transformers, and fields of the family's `config.json`."""


def build_random(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with random weights; norms are around a half."""
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() >= 2 else 0.5, std=0.2)
    return model


def change_fields(folder: Path, fields: dict[str, Any]) -> None:
    """Change fields of a `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rename_prefixes(path: Path) -> None:
    """Rewrite a checkpoint under the names of NVIDIA's diffusion models."""
    tensors = {
        name.replace("lm_head.", "diffusion_head.").replace("model.", "encoder."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@torch.inference_mode()
def reference(model: PreTrainedModel, ids: list[int], ends: list[int]) -> Tensor:
    """Return logits of transformers in which a row sees up to the end of its block."""
    stops = torch.tensor([next(end for end in ends if end > slot) for slot in range(len(ids))])
    hidden = torch.arange(len(ids)) >= stops[:, None]
    mask = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    return model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]


def reference_without_mask(model: PreTrainedModel, ids: list[int], ends: list[int]) -> Tensor:
    """Return logits of transformers in which the mask token is never predicted."""
    logits = reference(model, ids, ends).clone()
    logits[:, MASK] = -torch.inf
    return logits


def use_official(theirs: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the naive loops over blocks read the logits of transformers."""

    def official(model: Any, canvas: list[int], ends: list[int]) -> Tensor:
        return reference_without_mask(theirs, canvas, ends).roll(model.config.shift, 0)

    monkeypatch.setattr(naive, "by_block", official)
