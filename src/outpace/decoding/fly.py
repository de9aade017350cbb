"""FLy: a draft that the target would not say is kept where the target is in doubt. Lossy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outpace.decoding.processor import NEVER
from outpace.decoding.sampling import Reader, Readout, Sample
from outpace.kernels.fused import to_device

BEST = 3
"""How many of the likeliest tokens say whether the target is in doubt, as in the authors' code."""

MOST = log(BEST)
"""Largest entropy that these may have, in nats."""


@dataclass(frozen=True, kw_only=True)
class Fly(Sample):
    """Loose verification ("Training-Free Loosely Speculative Decoding", 2025, arXiv 2511.22972).

    A draft that is not what the target says stays where two things hold: of the target's law there,
    at temperature 1, the terms -p log p of the three likeliest tokens add up to `entropy` or more,
    and each of the `window` drafts behind it is what the target says. A token that is banned never
    stays. One more slot is read than the `drafted` have.
    """

    drafted: tuple[int, ...]
    window: int
    entropy: float

    @property
    def whole(self) -> bool:
        """A draft is judged by those behind it."""
        return True

    @classmethod
    def group(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        choose, judge = cls.choice(reads, slots, device), cls.judge(reads, slots, device)
        counts = [len(wanted) for wanted in slots]
        proposed = [token for read in reads for token in (*read.drafted, -1)]
        drafted = to_device(np.array(proposed, dtype=np.int64), device)
        windows = to_device(np.repeat([read.window for read in reads], counts), device)
        entropies = np.array([read.entropy for read in reads], dtype=np.float32)
        gates = to_device(np.repeat(entropies, counts), device)

        def read(logits: Tensor, rows: slice) -> Readout:
            mine, said = drafted[rows], choose(logits, rows)
            agrees = said == mine
            allowed = logits.gather(-1, mine.clamp(min=0)[:, None]).squeeze(-1) > NEVER / 2
            loose = ~agrees & (mine >= 0) & allowed & (doubt(logits) >= gates[rows])
            kept = loose & (agreeing_behind(agrees) >= windows[rows])
            tokens = torch.where(kept, mine, said)
            return Readout(tokens, judge(logits, tokens, rows))

        return read


def doubt(logits: Tensor) -> Tensor:
    """Entropy `f32[R]` of the likeliest tokens of `logits f32[R, V]`, which is not normalised."""
    best = logits.log_softmax(-1).topk(min(BEST, logits.shape[-1])).values
    return -(best.exp() * best).sum(-1)


def agreeing_behind(agrees: Tensor) -> Tensor:
    """Length `i64[R]` of the run of `agrees [R]` that begins behind each row.

    The row behind the drafts of a read agrees with none, so that no run leaves its read.
    """
    places = torch.arange(len(agrees), device=agrees.device)
    ends = torch.where(agrees, len(agrees), places).flip(0).cummin(0).values.flip(0)
    return torch.cat((ends[1:] - places[1:], ends.new_zeros(1)))
