"""Attention over layers whose keys differ in shape: one back end for the layers of each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.attention.batch import AttentionBatch, Backend, RowSpan
from outpace.models.attention import Attend
from outpace.models.config import AttentionWindow


class ShapedAttention:
    """Back ends for the layers of each shape.

    Args:
        backends: back end of each shape.
        places: number of the back end of each layer, and the layer's index in it.
    """

    def __init__(self, backends: Sequence[Backend], places: Sequence[tuple[int, int]]) -> None:
        self.backends, self.places = backends, places

    @property
    def num_arrays(self) -> int:
        return sum(backend.num_arrays for backend in self.backends)

    def plan_arrays(self, spans: Sequence[RowSpan]) -> list[NDArray[np.int64]]:
        """Return the arrays of all back ends; none if one of them attends without arrays."""
        arrays = [array for backend in self.backends for array in backend.plan_arrays(spans)]
        return arrays if len(arrays) == self.num_arrays else []

    def plan_pass(self, batch: AttentionBatch) -> Attend:
        rest, plans = list(batch.plan_arrays), []
        for backend in self.backends:
            count = backend.num_arrays if rest else 0
            plans.append(backend.plan_pass(replace(batch, plan_arrays=rest[:count])))
            rest = rest[count:]

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            number, index = self.places[layer]
            return plans[number](index, q, k, v, sinks)

        return attend


def backend_by_shape(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    attention_windows: Sequence[AttentionWindow],
    select: Callable[[list[Tensor], list[Tensor], Sequence[AttentionWindow]], Backend],
) -> Backend:
    """Return the back end that `select` creates for all layers, or one for each shape of keys."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer, each in enumerate(keys):
        groups.setdefault(tuple(each.shape[1:]), []).append(layer)
    backends = [
        select(
            [keys[layer] for layer in layers],
            [values[layer] for layer in layers],
            [attention_windows[layer] for layer in layers] if attention_windows else (),
        )
        for layers in groups.values()
    ]
    if len(backends) == 1:
        return backends[0]
    places = {
        layer: (number, index)
        for number, layers in enumerate(groups.values())
        for index, layer in enumerate(layers)
    }
    return ShapedAttention(backends, [places[layer] for layer in range(len(keys))])
