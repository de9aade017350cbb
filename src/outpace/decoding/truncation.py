"""Truncation of logits: temperature, top-k, top-p and min-p.

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

from outpace.decoding.argmax import argmax_tokens
from outpace.decoding.sampling_params import MAX_TENSOR_COUNT, Sampling
from outpace.kernels.fused import SamplingTensors, to_device

NUCLEUS_CANDIDATES = 16
"""Tokens that contain most nuclei."""


def keep_top_k(logits: Tensor, top_k: Tensor, max_k: int) -> Tensor:
    """Return logits `[R, V]` with everything below the k-th largest at minus infinity.

    Ties survive. `max_k` is the largest k, or V where that is less.
    """
    ranked = logits.topk(max_k, -1).values
    threshold = ranked.gather(-1, (top_k.clamp(max=max_k) - 1)[:, None])
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Return logits `[R, V]` with tokens below `min_p` of the best at minus infinity."""
    threshold = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Return logits `[R, V]` with everything outside the nucleus at minus infinity.

    Most nuclei are within the few most probable tokens; only rows where they are not are sorted. On
    a GPU all rows are sorted, since finding out which rows need it would synchronise.
    """
    few = min(NUCLEUS_CANDIDATES, logits.shape[-1]) if reads_are_free(logits) else logits.shape[-1]
    threshold, is_full = nucleus_thresholds(logits, top_p, few)
    if few < logits.shape[-1] and len(open_rows := is_full.nonzero().squeeze(-1)):
        threshold[open_rows] = nucleus_thresholds(
            logits[open_rows], top_p[open_rows], logits.shape[-1]
        )[0]
    return logits.masked_fill(logits < threshold, -torch.inf)


def reads_are_free(logits: Tensor) -> bool:
    """Return whether the host can read these numbers without synchronising."""
    return logits.device.type == "cpu"


def nucleus_thresholds(logits: Tensor, top_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the lowest nucleus logit `[R, 1]` among the `count` best, and if all are inside."""
    ranked, columns = logits.topk(count, -1)
    mass = logits.softmax(-1).gather(-1, columns)
    inside = (mass.cumsum(-1) - mass <= top_p[:, None]).sum(-1)
    return ranked.gather(-1, inside.clamp(min=1)[:, None] - 1), inside == count


def nucleus_argmax(logits: Tensor, noised: Tensor, top_p: Tensor) -> Tensor:
    """Return the arg-max `[R]` of `noised [R, V]` over the nucleus of `logits`.

    A token is in the nucleus (Holtzman et al., 2020) unless the more probable tokens hold more than
    `top_p`. Nothing is sorted: the best candidate is tried first and is nearly always inside. Where
    it is not, all tokens that are no more probable are outside too.
    """
    tokens = argmax_tokens(noised)
    open_rows = (top_p < 1).nonzero().squeeze(-1)
    probabilities = logits.softmax(-1) if len(open_rows) else logits
    while len(open_rows):
        level = logits[open_rows].gather(-1, tokens[open_rows, None])
        above = torch.where(logits[open_rows] > level, probabilities[open_rows], 0).sum(-1)
        outside = above > top_p[open_rows]
        open_rows, level = open_rows[outside], level[outside]
        remaining = noised[open_rows].masked_fill(logits[open_rows] <= level, -torch.inf)
        noised = noised.index_copy(0, open_rows, remaining)
        tokens[open_rows] = argmax_tokens(remaining)
    return tokens


@dataclass(slots=True, kw_only=True)
class LogitTruncation:
    """Sampling settings of a group's rows; `host_settings f64[4, R]` are the same on the host.

    The host decides what needs no work, so it never waits for a device.
    """

    settings: SamplingTensors
    host_settings: NDArray[np.float64]

    @classmethod
    def from_requests(
        cls, samplings: Sequence[Sampling], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Self:
        """Build the settings of each row from those of its request."""
        table = [(s.temperature, s.top_p, s.top_k or MAX_TENSOR_COUNT, s.min_p) for s in samplings]
        repeated = np.repeat(np.array(table, dtype=np.float64).T, list(map(len, slots)), 1)
        real = to_device(repeated.astype(np.float32), device)
        top_k = to_device(repeated[2].astype(np.int64), device)
        return cls(
            settings=SamplingTensors(real[0], real[1], top_k, real[3]), host_settings=repeated
        )

    def settings_of(self, rows: slice | Tensor) -> SamplingTensors:
        """Return the settings of some rows of the group."""
        return SamplingTensors(*(setting[rows] for setting in self.settings))

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the truncated logits `[r, V]` of the rows `rows` of the group."""
        settings, host_rows, logits = (
            self.settings_of(rows),
            self.host_settings[:, rows],
            logits.float(),
        )
        if (host_rows[0] > 0).any():
            divisor = torch.where(settings.temperature > 0, settings.temperature, 1)
            logits = logits / divisor[:, None]
        if (host_rows[1] < 1).any():
            # Rounding may take the mass of a row above one.
            top_p = torch.where(settings.top_p < 1, settings.top_p, torch.inf)
            logits = keep_top_p(logits, top_p)
        return apply_top_k_min_p(logits, settings, host_rows)


def apply_top_k_min_p(
    logits: Tensor, settings: SamplingTensors, host_settings: NDArray[np.float64]
) -> Tensor:
    """Apply min-p and top-k to logits `[R, V]`; `host_settings f64[4, R]` as above."""
    _, _, top_k, min_p = host_settings
    if (min_p > 0).any():
        logits = keep_min_p(logits, settings.min_p)
    if (top_k < logits.shape[-1]).any():
        logits = keep_top_k(logits, settings.top_k, int(min(top_k.max(), logits.shape[-1])))
    return logits
