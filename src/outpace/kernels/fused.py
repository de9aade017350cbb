"""Tokens and scores of logits in one pass over them, where a device can run the kernel.

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
"""Rows of the table that the kernel writes."""

BLOCK = 4096
"""Columns that are read in one go."""


class Settings(NamedTuple):
    """How the rows of a group are drawn, each a tensor `[R]`."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor


@cache
def runs_triton(device: torch.device) -> bool:
    """Whether a device runs the kernel."""
    return device.type == "cuda" and find_spec("triton") is not None


def read_rows(
    logits: Tensor,
    settings: Settings,
    keys: Tensor,
    guess: Tensor | None = None,
    ratio: Tensor | None = None,
    drawn: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens `i64[R]` of `logits [R, V]` of any dtype, and every score `f32[R]` by its name.

    Tokens are drawn under the noise of `keys i64[R]`, at temperature 0 they are the arg-max. With
    a `guess [R, V]` and a `ratio f32[R]` the logits are `torch.lerp(logits, guess, ratio)`. Scores
    are those of the logits at temperature 1, and not cut; but in the rows that are `drawn bool[R]`
    those of the law that tokens are drawn from, the logprob excepted.
    """
    from outpace.kernels import read  # only now, since it loads Triton

    rows, vocab = logits.shape
    logits = in_rows(logits)
    other = logits if guess is None else in_rows(guess)
    tokens, scores = blank(logits)
    read.read[rows,](
        *(logits, other, keys if ratio is None else ratio),
        *(settings.temperature, settings.top_p, settings.top_k, settings.min_p.log()),
        *(keys, keys if drawn is None else drawn, tokens, scores),
        *(rows, vocab, logits.stride(0), other.stride(0)),
        BLOCK=BLOCK,
        GUESS=guess is not None,
        DRAWN=drawn is not None,
        num_warps=8,
    )
    return tokens, dict(zip(SCORES, scores, strict=True))


class Drafts(NamedTuple):
    """What rejection sampling knows of each of `[R]` rows.

    Its draft `i64[R]`, -1 where there is none, the row `i64[R]` of the guesses that it was drawn
    from, and the key `i64[R]` of the coin that decides on it.
    """

    tokens: Tensor
    places: Tensor
    coins: Tensor


def verify_rows(
    logits: Tensor, guess: Tensor, drafts: Drafts, settings: Settings, keys: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens `i64[R]` by rejection sampling, and every score `f32[R]` by its name.

    The logits `[R, V]` of a target and those of the `guess [n, W]` are of any dtype. Scores are
    those of the target's logits at temperature 1, and not cut.
    """
    from outpace.kernels import rejection  # only now, since it loads Triton

    logits, guess = in_rows(logits), in_rows(guess)
    tokens, scores = blank(logits)
    rejection.verify[len(logits),](
        *(logits, guess, drafts.tokens, drafts.places),
        *(settings.temperature, settings.top_p, settings.top_k, settings.min_p.log()),
        *(keys, drafts.coins, tokens, scores, *logits.shape, guess.shape[1]),
        *(logits.stride(0), guess.stride(0)),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return tokens, dict(zip(SCORES, scores, strict=True))


def in_rows(logits: Tensor) -> Tensor:
    """The same numbers, those of a row side by side."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def blank(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the tokens of `logits [R, V]`, and for all of their scores."""
    rows, device = len(logits), logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    return tokens, torch.empty(len(SCORES), rows, dtype=torch.float32, device=device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on a device, for which the host does not wait."""
    there = torch.from_numpy(array)
    if device.type != "cuda":
        return there.to(device)
    return there.pin_memory().to(device, non_blocking=True)
