"""Recipe of a DFlash draft for any target, sized by the target and by its answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outpace.checkpoints.hub import resolve_checkpoint
from outpace.checkpoints.load import load_config
from outpace.jsonl import read_lines
from outpace.models.config import ModelConfig
from outpace.models.device import computes_bfloat16, resolve_device
from outpace.training.data import Data, Examples
from outpace.training.run_setup import require_tokenizer

HEAD_TOKENS = 16384
"""Tokens of the draft's head: 97 of 100 in held-out answers (code, arithmetic, prose, JSON)."""

WINDOW = 256
"""Slots before a block that a draft on a CPU reads. One that was trained on short texts accepts
fewer tokens after longer ones if it reads them all (benchmarks/results/draft-turns.json)."""

LEARNT = {2400: 1.81, 12000: 2.48, 26400: 2.95, 33700: 3.44, 42200: 3.57, 50200: 3.72, 79000: 4.13}
"""Held-out accepted tokens per verification of the draft in `drafts/` of Qwen2.5-Coder-0.5B, after
this many answers of all epochs (benchmarks/results/real-text-training.json)."""

Sections = dict[str, dict[str, Any]]
"""Sections of a recipe by their name, with dots; that of keys outside sections is empty."""


def draft_recipe(target: str, data: Path, out: Path, template: Mapping[str, Any]) -> Sections:
    """Return a recipe for a draft of `target`, trained three times on each of its answers."""
    # On a GPU the draft has five layers and blocks of 16, as those of the authors (Chen et al.,
    # 2026, section A.1), and a separate head, which other programs load. On a CPU it has three
    # layers with a window, blocks of 8 and rows of the target's head, and the target's features are
    # stored. The head covers the most frequent tokens of the answers; the mask is the last token
    # that no answer has.
    on_gpu, half = has_gpu(), computes_bfloat16(resolve_device(None))
    trained: dict[str, Any] = {
        "path": str(data / "train.jsonl"),
        "longest": 1024 if on_gpu else 512,
    }
    if not on_gpu:
        trained["features"] = str(out.parent / "features")
    held, config = str(data / "held.jsonl"), load_config(target)
    examples = Examples(
        Data(**trained, template=template), require_tokenizer(resolve_checkpoint(target))
    )
    return {
        "": {"out": str(out)},
        "model": {"target": target, "dtype": "bfloat16" if half else "float32"},
        "model.config": {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "block_size": 16 if on_gpu else 8,
            "draft_vocab_size": min(HEAD_TOKENS, config.vocab),
            "target_head": not on_gpu,
            "mask_token_id": find_unused_token(examples, config.vocab),
            "aux_hidden_state_layer_ids": choose_layers(config.layers),
            **({} if on_gpu else {"sliding_window_non_causal": True}),
        },
        "model.config.transformer_layer_config": layer_sizes(config, draft_layers())
        | ({} if on_gpu else window_fields(draft_layers())),
        "objective": {"name": "dflash", "anchors": 256 if on_gpu else 24, "dpace": True},
        "data": trained,
        "data.template": dict(template),
        "optim": {
            "lr": 4e-4,
            "warmup": 50,
            "decay": 0.7,
            "weight_decay": 0.01,
            "betas": [0.9, 0.95],
        },
        "train": {"epochs": 3, "batch": 4, "precision": "bf16" if half else "no"},
        "held_out": {
            "path": held,
            "examples": min(48, len(read_lines(Path(held)))),
            "best": "accepted",
        },
    }


def accepted_after(answers: float) -> float:
    """Return the value of `LEARNT` for a number of answers, between its ends."""
    known = [*map(math.log, LEARNT)]
    return float(np.interp(math.log(max(answers, 1.0)), known, [*LEARNT.values()]))


def layer_sizes(config: ModelConfig, layers: int) -> dict[str, Any]:
    """Return the `transformer_layer_config` of a draft with layers of a target's size."""
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab,
        "hidden_size": config.dim,
        "intermediate_size": 3 * config.dim,
        "num_hidden_layers": layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
    }


def window_fields(layers: int) -> dict[str, Any]:
    """Return the fields of a `transformer_layer_config` whose layers all have a window."""
    return {"layer_types": ["sliding_attention"] * layers, "sliding_window": WINDOW}


def has_gpu() -> bool:
    return resolve_device(None).type != "cpu"


def draft_layers() -> int:
    return 5 if has_gpu() else 3


def count_weights(config: ModelConfig) -> int:
    """Return the number of weights of a draft for a target."""
    heads = 2 * (config.heads + config.kv_heads) * config.head_dim
    features = len(choose_layers(config.layers)) * config.dim
    layers = draft_layers() * (heads + 9 * config.dim)
    head = min(HEAD_TOKENS, config.vocab) if has_gpu() else 0
    return config.dim * (layers + features + head)


def choose_layers(count: int) -> list[int]:
    """Return up to five layers whose features a draft reads, evenly spaced (section 4.1)."""
    last = max(count - 3, 0)
    first = min(1, last)
    return sorted({round(first + (last - first) * place / 4) for place in range(5)})


def find_unused_token(examples: Examples, vocab: int) -> int:
    """Return the last token id that no example has; raises `ValueError` if all have each."""
    used = set[int]()
    for number in range(examples.epoch_size or 0):
        example = examples[number]
        used.update(example.prompt, example.response)
    unused = (token for token in reversed(range(vocab)) if token not in used)
    if (token := next(unused, None)) is None:
        raise ValueError("every token of the vocabulary occurs in the answers: none can be a mask")
    return token


def write_recipe(sections: Sections) -> str:
    """Return the TOML text of a recipe."""
    parts = []
    for name, section in sections.items():
        lines = [f"[{name}]"] if name else []
        parts.append("\n".join([*lines, *(f"{k} = {json.dumps(v)}" for k, v in section.items())]))
    return "\n\n".join(parts) + "\n"
