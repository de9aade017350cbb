"""The tokens of several holes at once: the most probable that fit, or an exact draw.

Shapes: h holes, V tokens, C classes of tokens, B bundles of classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.constraint.automaton import HOLE, Automaton
from outpace.constraint.reach import Moves, Reach
from outpace.constraint.vocabulary import Ids
from outpace.decoding.cut import Cut
from outpace.decoding.sampling import Sample, Sampling, noise_of

Weights = NDArray[np.floating[Any]]

FEW = 4
"""Holes that are looked at before all others."""

LOWEST = -1e38
"""Stands for the logarithm of nothing where a difference is taken."""


def completed(
    reach: Reach, places: Sequence[int], logits: Tensor, begin: int, read: Sample
) -> Tensor:
    """Tokens `[h]` of the holes at `places`, whose logits are `[h, V]`, that fit together.

    At temperature 0 the most probable ones, by dynamic programming (Suresh et al., 2025). Else a
    draw of the product of their laws given that they fit: backward sums, then a draw from left to
    right (Dang and Ermon, 2026), with the noise of a step of its own. Where what top-p, top-k and
    min-p leave has no fitting tokens, the laws are not cut. Holes among them that were not
    predicted count as uniform. `begin` is the slot of place 0.
    """
    end, automaton, sampling = places[-1] + 1, reach.sets.automaton, read.sampling
    holes, law = {place: row for row, place in enumerate(places)}, logits
    wild = [p for p in range(reach.first, end) if p not in holes and reach.kind(p) == HOLE]
    if wild:
        holes |= {place: row for row, place in enumerate(wild, len(places))}
        law = torch.cat((law, law.new_zeros(len(wild), law.shape[1])))
    rows = [holes.get(place) for place in range(reach.first, end)]
    slots, luck, steps = [begin + place for place in holes], None, reach.steps(end)
    if sampling.temperature:
        turns = [-1 - 3 * read.step - turn for turn in range(3)]
        luck = fractions(noise_of([sampling] * 3, turns, [slots] * 3)).reshape(3, -1)
        law = drawn(
            law, slots, sampling, lambda cut: possible(steps, rows, Law(automaton, cut, None))
        )
    each = Law(automaton, law, luck)
    taken = path(steps, rows, each)
    chosen = [each.token(row, taken[place - reach.first]) for place, row in holes.items()]
    return torch.tensor(chosen[: len(places)], device=logits.device)


def drawn(
    law: Tensor, slots: Sequence[int], sampling: Sampling, fits: Callable[[Tensor], bool]
) -> Tensor:
    """Logarithms `[h, V]` of what tokens are drawn by: cut, or where nothing then `fits`, not.

    The first few holes mostly say so.
    """
    for count in (FEW, len(law)):
        cut = Cut.of([sampling], [slots[:count]], law.device)(law[:count], slice(0, count))
        if sampling.cuts and not fits(cut):
            return law / sampling.temperature
    return cut


def fractions(keys: Tensor) -> Weights:
    """Uniform numbers below one, of keys of 62 bits."""
    return (keys.numpy() >> 9) * 2.0**-53


class Law:
    """What tokens are worth in each hole, and what classes and bundles of them are.

    `luck` are three uniform numbers for each hole, `[3, h]`, or None where the best is taken.

    Attributes:
        values: `[h, V]`, logarithms, by classes.
        weights: `[h, C]`, the logarithm of what a class has together; without luck of its best.
        sums: `[h, B]`, the same of bundles.
    """

    def __init__(self, automaton: Automaton, law: Tensor, luck: Weights | None) -> None:
        self.automaton = automaton
        self.luck = luck
        self.values = law.cpu().numpy().take(automaton.order, axis=1)
        some, inside = automaton.some, automaton.inside
        self.weights = np.full((len(law), automaton.table.shape[1]), -np.inf, dtype=np.float32)
        self.weights[:, some] = self.added(self.values, np.diff(automaton.bounds)[some])
        self.sums = self.added(self.weights.take(automaton.members, axis=1), inside.counts)

    def added(self, values: Weights, sizes: Ids) -> Weights:
        """What neighbours, so many each, have together."""
        begins = sizes.cumsum() - sizes
        tops = np.maximum.reduceat(values, begins, axis=1)
        if self.luck is None:
            return tops
        tops = np.maximum(tops, LOWEST)
        parts = np.exp(values - tops.repeat(sizes, axis=1))
        with np.errstate(divide="ignore"):
            return tops + np.log(np.add.reduceat(parts, begins, axis=1))

    def token(self, row: int, bundle: int) -> int:
        """One of a bundle."""
        automaton = self.automaton
        first, count = automaton.inside.firsts[bundle], automaton.inside.counts[bundle]
        kinds = automaton.members[first : first + count]
        kind = kinds[self.pick(self.weights[row, kinds], row, 1)]
        begin, end = automaton.bounds[kind : kind + 2]
        return int(automaton.order[begin + self.pick(self.values[row, begin:end], row, 2)])

    def pick(self, worth: Weights, row: int, turn: int) -> int:
        """The place of the best, or of one drawn by logarithms of its weight."""
        if len(worth) == 1:
            return 0
        if self.luck is None:
            return int(worth.argmax())
        mass = np.exp(worth - worth.max(), dtype=np.float64).cumsum()
        return int(mass.searchsorted(self.luck[turn, row] * mass[-1], side="right"))


def possible(steps: Sequence[Moves], rows: Sequence[int | None], law: Law) -> bool:
    """Whether anything fits, as far as there are holes in `law`: mostly not where it is cut."""
    reached, left = np.ones(1, dtype=bool), law.sums > -np.inf
    for step, row in zip(steps, rows, strict=True):
        if row is not None and row >= len(left):
            return True
        live = (
            reached[step.owners] if row is None else reached[step.owners] & left[row][step.bundles]
        )
        reached = np.zeros(step.count, dtype=bool)
        reached[step.tos[live]] = True
        if not reached.any():
            return False
    return True


def path(steps: Sequence[Moves], rows: Sequence[int | None], law: Law) -> list[int]:
    """The bundle that each step takes, of which some fit.

    `rows` are those of the holes in `law`; a step of None is a token, which takes none.
    """
    rests: list[Weights] = [
        np.zeros(steps[-1].count)
    ]  # of states in front of the last place, the one before, …
    add = greatest if law.luck is None else total
    with np.errstate(divide="ignore"):
        for step, row in zip(reversed(steps), reversed(rows), strict=True):
            worth = rests[-1][step.tos]
            rests.append(worth if row is None else add(worth + law.sums[row][step.bundles], step))
    state, taken = 0, []
    for step, row, rest in zip(steps, rows, rests[-2::-1], strict=True):
        entry = int(step.begins[state])
        if row is not None:
            own = slice(entry, step.ends[state])
            worth = law.sums[row][step.bundles[own]] + rest[step.tos[own]]
            entry += law.pick(worth, row, 0)
        taken.append(-1 if row is None else int(step.bundles[entry]))
        state = int(step.tos[entry])
    return taken


def greatest(worth: Weights, step: Moves) -> Weights:
    """The best of what each state has."""
    return np.maximum.reduceat(worth, step.begins)


def total(worth: Weights, step: Moves) -> Weights:
    """The logarithm of all that each state has."""
    tops = np.maximum(np.maximum.reduceat(worth, step.begins), LOWEST)
    parts = np.exp(worth - tops[step.owners])
    return tops + np.log(np.add.reduceat(parts, step.begins))
