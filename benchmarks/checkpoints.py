"""Checkpoints to measure: random weights in the published formats, and how they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outpace import LLM
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.load import save_model
from outpace.methods import Method
from outpace.models.transformer import Transformer

Config = dict[str, Any]


def qwen2(dim: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> Config:
    """`config.json` of a Qwen2 model with tied embeddings and no end-of-sequence."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
        "use_sliding_window": False,
        "use_cache": True,
    }


def with_mask(config: Config) -> Config:
    """The same sizes untied; the last two tokens are end and mask."""
    vocab = config["vocab_size"]
    return {
        **config,
        "tie_word_embeddings": False,
        "eos_token_id": vocab - 2,
        "pad_token_id": vocab - 2,
        "mask_token_id": vocab - 1,
    }


def dream(config: Config) -> Config:
    """The Dream model of a Qwen2 model's sizes."""
    return {**with_mask(config), "architectures": ["DreamModel"], "model_type": "Dream"}


def qwen3(config: Config) -> Config:
    """The fields in which Qwen3's shape differs from a Qwen2 model's of these sizes."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return {**config, "tie_word_embeddings": False, "attention_bias": False, "head_dim": head}


def wedlm(config: Config) -> Config:
    """The WeDLM model of a Qwen2 model's sizes, in Qwen3's shape."""
    return {
        **with_mask(qwen3(config)),
        "architectures": ["WeDLMForCausalLM"],
        "model_type": "wedlm",
        "qk_norm": True,
    }


TINY_AR = qwen2(192, 6, 6, 2, 512, 1024)
TINY_AUX = qwen2(128, 4, 4, 2, 352, 1024)
SMALL = qwen2(512, 8, 8, 2, 1536, 8192)
SMALL_DREAM = dream(SMALL)
SMALL_AUX = qwen2(256, 4, 8, 2, 768, 8192)
SMALL_GROUPED = qwen2(512, 8, 8, 4, 1536, 8192)
SMALL_WEDLM = wedlm(SMALL_GROUPED)


def write(
    folder: Path, config: Config, *, seed: int = 0, mute: Sequence[int] = (), peak: float = 1.0
) -> Path:
    """A float32 checkpoint that says varied things; an untied one never the tokens `mute`.

    `peak` is a factor of an untied head: the larger, the surer is the model of what it says.
    """
    torch.manual_seed(seed)
    model = Transformer(translate_config(config)).requires_grad_(False)
    for weight in (w for w in model.blocks.parameters() if w.dim() == 2):
        weight.mul_(2 / (weight.std() * weight.shape[1] ** 0.5))
    if peak != 1.0:
        model.get_parameter("unembedding.weight").mul_(peak)
    if mute:
        model.get_parameter("unembedding.weight")[list(mute)] = 0
    save_model(model, folder, dtype=torch.float32)
    return folder


def silenced(config: Config) -> tuple[int, int]:
    """End and mask, which neither side of a comparison may say: to be `mute`."""
    return config["eos_token_id"], config["mask_token_id"]


def load(target: str | Path, method: Method | None = None) -> LLM:
    """A model in float32 on the CPU, which computes every prompt."""
    return LLM(target, method, device="cpu", dtype="float32", cache_gib=0.25, prefix_cache=False)


def prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    """Random ids, without the two last tokens, which mean something in a diffusion model."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab - 2, (length,), generator=generator).tolist()
    return ids
