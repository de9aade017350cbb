"""What is left of logits where only the most probable tokens may be drawn.

Shapes: R rows, V vocabulary; settings are tensors `[R]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.likeliest import likeliest
from outpace.decoding.sampling_params import MOST, Sampling
from outpace.kernels.fused import Settings, to_device

FEW = 16
"""Tokens among which a nucleus mostly lies."""


def keep_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Logits `[R, V]` with everything below the k-th largest at minus infinity; ties survive.

    `most` is the largest k, or V where that is less.
    """
    ranked = logits.topk(most, -1).values
    edge = ranked.gather(-1, (top_k.clamp(max=most) - 1)[:, None])
    return logits.masked_fill(logits < edge, -torch.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Logits `[R, V]` with what is too improbable beside the best at minus infinity."""
    edge = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    return logits.masked_fill(logits < edge, -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Logits `[R, V]` with everything outside the nucleus at minus infinity.

    It mostly lies within the few most probable tokens; only rows where it does not are sorted. A
    GPU sorts all, rather than let the host wait for which these are.
    """
    few = min(FEW, logits.shape[-1]) if waits(logits) else logits.shape[-1]
    edge, full = edges(logits, top_p, few)
    if few < logits.shape[-1] and len(wide := full.nonzero().squeeze(-1)):
        edge[wide] = edges(logits[wide], top_p[wide], logits.shape[-1])[0]
    return logits.masked_fill(logits < edge, -torch.inf)


def waits(logits: Tensor) -> bool:
    """Whether the host may look at numbers at no cost."""
    return logits.device.type == "cpu"


def edges(logits: Tensor, top_p: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The least logit `[R, 1]` of the nucleus, of `most` tokens, and whether it has all of them."""
    ranked, places = logits.topk(most, -1)
    mass = logits.softmax(-1).gather(-1, places)
    kept = (mass.cumsum(-1) - mass <= top_p[:, None]).sum(-1)
    return ranked.gather(-1, kept.clamp(min=1)[:, None] - 1), kept == most


def nucleus(logits: Tensor, noised: Tensor, top_p: Tensor) -> Tensor:
    """Arg-max of `noised [R, V]` over the nucleus of `logits` (Holtzman et al., 2020), `[R]`.

    A token is in the nucleus unless the tokens that are more probable hold more than `top_p`.
    Nothing is sorted: the best candidate is tried first and nearly always inside; where it is
    not, all tokens that are no more probable are outside too.
    """
    tokens = likeliest(noised)
    open_rows = (top_p < 1).nonzero().squeeze(-1)
    probabilities = logits.softmax(-1) if len(open_rows) else logits
    while len(open_rows):
        level = logits[open_rows].gather(-1, tokens[open_rows, None])
        above = torch.where(logits[open_rows] > level, probabilities[open_rows], 0).sum(-1)
        outside = above > top_p[open_rows]
        open_rows, level = open_rows[outside], level[outside]
        left = noised[open_rows].masked_fill(logits[open_rows] <= level, -torch.inf)
        noised = noised.index_copy(0, open_rows, left)
        tokens[open_rows] = likeliest(left)
    return tokens


@dataclass(slots=True, kw_only=True)
class Cut:
    """The settings of a group's rows; `known` has the same numbers on the host, `f64[4, R]`.

    What needs no work is decided on the host, which so never waits for a device.
    """

    settings: Settings
    known: NDArray[np.float64]

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Self:
        """Spread each request's settings over the slots that it wants."""
        each = [(s.temperature, s.top_p, s.top_k or MOST, s.min_p) for s in samplings]
        known = np.repeat(np.array(each, dtype=np.float64).T, list(map(len, slots)), 1)
        real = to_device(known.astype(np.float32), device)
        top_k = to_device(known[2].astype(np.int64), device)
        return cls(settings=Settings(real[0], real[1], top_k, real[3]), known=known)

    def of_rows(self, rows: slice | Tensor) -> Settings:
        """The settings of some rows of the group."""
        return Settings(*(setting[rows] for setting in self.settings))

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Logits `[r, V]` of the rows `rows` of the group, as their tokens are drawn."""
        settings, known, logits = self.of_rows(rows), self.known[:, rows], logits.float()
        if (known[0] > 0).any():
            heat = torch.where(settings.temperature > 0, settings.temperature, 1)
            logits = logits / heat[:, None]
        if (known[1] < 1).any():
            # Rounding may bring the mass of a row above one.
            top_p = torch.where(settings.top_p < 1, settings.top_p, torch.inf)
            logits = keep_top_p(logits, top_p)
        return narrowed(logits, settings, known)


def narrowed(logits: Tensor, settings: Settings, known: NDArray[np.float64]) -> Tensor:
    """Logits `[R, V]` without what top-k and min-p leave out; `known f64[4, R]` as in a `Cut`."""
    _, _, top_k, min_p = known
    if (min_p > 0).any():
        logits = keep_min_p(logits, settings.min_p)
    if (top_k < logits.shape[-1]).any():
        logits = keep_top_k(logits, settings.top_k, int(min(top_k.max(), logits.shape[-1])))
    return logits
