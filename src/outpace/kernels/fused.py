"""Launchers of the fused sampling kernels on a GPU.

Shapes: R rows, V vocabulary; settings are tensors `[R]`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SCORES = ("confidence", "logprob", "margin", "entropy", "logsum")
"""Rows of the score table that the kernels write."""

BLOCK_COLUMNS = 4096
"""Columns of logits per iteration."""


class SamplingTensors(NamedTuple):
    """Sampling parameters of each row, as tensors `[R]`."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


@cache
def runs_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def read_rows(
    logits: Tensor,
    settings: SamplingTensors,
    keys: Tensor,
    guess: Tensor | None = None,
    ratio: Tensor | None = None,
    drawn: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sample tokens `i64[R]` of `logits [R, V]`, and compute every score `f32[R]` by name.

    Args:
        logits: Logits `[R, V]` of any dtype.
        settings: Sampling parameters; at temperature 0 the token is the arg-max.
        keys: Noise keys `i64[R]`.
        guess: Logits `[R, V]` to mix in, as `torch.lerp(logits, guess, ratio)`.
        ratio: Mixing ratios `f32[R]`, with `guess`.
        drawn: Rows `bool[R]` with confidence, margin and entropy of the distribution after
            temperature, top-p, top-k and min-p. All other scores are at temperature 1, unfiltered.
    """
    from outpace.kernels import read  # imported late, since it loads Triton

    rows, vocab = logits.shape
    logits = contiguous_rows(logits)
    guess_rows = logits if guess is None else contiguous_rows(guess)
    tokens, scores = allocate_outputs(logits)
    read.read[rows,](
        logits=logits,
        guesses=guess_rows,
        ratios=keys if ratio is None else ratio,
        **filter_tensors(settings),
        keys=keys,
        drawn=keys if drawn is None else drawn,
        tokens=tokens,
        scores=scores,
        rows=rows,
        vocab=vocab,
        stride=logits.stride(0),
        guess_stride=guess_rows.stride(0),
        BLOCK=BLOCK_COLUMNS,
        GUESS=guess is not None,
        DRAWN=drawn is not None,
        num_warps=8,
    )
    return tokens, dict(zip(SCORES, scores, strict=True))


class DraftRows(NamedTuple):
    """Draft tokens for rejection sampling; tensors `i64[R]`."""

    tokens: Tensor
    """Draft token of each row; -1 for none."""
    places: Tensor
    """Row of the draft's logits that it was sampled from."""
    coins: Tensor
    """Noise key of the acceptance decision."""


def verify_rows(
    logits: Tensor, guess: Tensor, drafts: DraftRows, settings: SamplingTensors, keys: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sample tokens `i64[R]` by rejection sampling, and compute every score `f32[R]` by name.

    Target logits `[R, V]` and draft logits `guess [n, W]` may have any dtype. Scores are of the
    target's logits at temperature 1, unfiltered.
    """
    from outpace.kernels import rejection  # imported late, since it loads Triton

    logits, guess = contiguous_rows(logits), contiguous_rows(guess)
    tokens, scores = allocate_outputs(logits)
    rows, vocab = logits.shape
    rejection.verify[rows,](
        logits=logits,
        guesses=guess,
        drafted=drafts.tokens,
        places=drafts.places,
        **filter_tensors(settings),
        keys=keys,
        coins=drafts.coins,
        tokens=tokens,
        scores=scores,
        rows=rows,
        vocab=vocab,
        width=guess.shape[1],
        stride=logits.stride(0),
        guess_stride=guess.stride(0),
        BLOCK=BLOCK_COLUMNS,
        num_warps=8,
    )
    return tokens, dict(zip(SCORES, scores, strict=True))


def filter_tensors(settings: SamplingTensors) -> dict[str, Tensor]:
    """Return sampling parameters by the names of kernel arguments; min-p as a logarithm."""
    return {
        "temperatures": settings.temperature,
        "top_ps": settings.top_p,
        "top_ks": settings.top_k,
        "min_ps": settings.min_p.log(),
    }


def contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def allocate_outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, device = len(logits), logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    return tokens, torch.empty(len(SCORES), rows, dtype=torch.float32, device=device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device asynchronously."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
