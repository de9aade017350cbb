"""FLy: lossy verification that accepts a mismatch where the target is uncertain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outpace.decoding.processor import BANNED_LOGIT
from outpace.decoding.sampling import GroupReader, Readout, Sample
from outpace.kernels.fused import to_device

FLY_TOP_TOKENS = 3
"""Most probable tokens over which the target's uncertainty is measured, as in the authors' code."""

MAX_FLY_ENTROPY = log(FLY_TOP_TOKENS)
"""Largest entropy of these tokens, in nats."""


@dataclass(frozen=True, kw_only=True)
class Fly(Sample):
    """Loose verification ("Training-Free Loosely Speculative Decoding", 2025, arXiv 2511.22972).

    A draft that differs from the target's token is accepted under two conditions. First, the terms
    -p log p of the target's three most probable tokens at temperature 1 add up to `entropy` or
    more. Second, each of the next `window` drafts equals the target's token. A banned token is
    never accepted. One slot more than the `drafted` is read.
    """

    drafted: tuple[int, ...]
    window: int
    entropy: float

    @property
    def needs_all_rows(self) -> bool:
        """True, since a draft is judged by those after it."""
        return True

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return a reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        choose, judge = (
            cls.make_chooser(reads, slots, device),
            cls.make_scorer(reads, slots, device),
        )
        counts = [len(wanted) for wanted in slots]
        proposed = [token for read in reads for token in (*read.drafted, -1)]
        drafted = to_device(np.array(proposed, dtype=np.int64), device)
        windows = to_device(np.repeat([read.window for read in reads], counts), device)
        entropies = np.array([read.entropy for read in reads], dtype=np.float32)
        thresholds = to_device(np.repeat(entropies, counts), device)

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            own_drafts, target_tokens = drafted[rows], choose(logits, rows)
            agrees = target_tokens == own_drafts
            allowed = (
                logits.gather(-1, own_drafts.clamp(min=0)[:, None]).squeeze(-1) > BANNED_LOGIT / 2
            )
            loose = (
                ~agrees & (own_drafts >= 0) & allowed & (top_entropy(logits) >= thresholds[rows])
            )
            accepted = loose & (agreement_run_after(agrees) >= windows[rows])
            tokens = torch.where(accepted, own_drafts, target_tokens)
            return Readout(tokens, judge(logits, tokens, rows))

        return read_chunk


def top_entropy(logits: Tensor) -> Tensor:
    """Entropy terms `f32[R]` of the most probable tokens of `logits f32[R, V]`, summed."""
    best = logits.log_softmax(-1).topk(min(FLY_TOP_TOKENS, logits.shape[-1])).values
    return -(best.exp() * best).sum(-1)


def agreement_run_after(agrees: Tensor) -> Tensor:
    """Length `i64[R]` of the run of `agrees [R]` that begins after each row.

    The row after the drafts of a read never agrees, so no run extends beyond its read.
    """
    rows = torch.arange(len(agrees), device=agrees.device)
    ends = torch.where(agrees, len(agrees), rows).flip(0).cummin(0).values.flip(0)
    return torch.cat((ends[1:] - rows[1:], ends.new_zeros(1)))
