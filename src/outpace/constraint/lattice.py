"""Joint decoding of several holes: the most probable tokens that fit, or an exact sample.

Shapes: h holes, V tokens, C token classes, B bundles of classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, count, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.constraint.automaton import Automaton
from outpace.constraint.dfa import Flags, Ids
from outpace.constraint.reach import Moves
from outpace.decoding.cut import Cut
from outpace.decoding.sampling import Sample, noise_of

Weights = NDArray[np.floating[Any]]

FEW = 4
"""Holes that are checked before all others."""

SMALL = 200
"""Moves below which a direct log-sum-exp is faster than a shifted sum."""

MOST = 2**24
"""Approximate number of logits processed together, so that several copies fit into memory."""

LOWEST = -1e38
"""Logarithm of zero where differences are taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Consecutive places of an answer: holes and the tokens between them.

    Attributes:
        steps: moves from place to place; a single state is possible before the first.
        holes: whether each place is a hole.
        rows: row that predicts each hole, or -1.
        slots: slot of each hole.
        read: how the tokens are read.
    """

    steps: Sequence[Moves]
    holes: Sequence[bool]
    rows: Sequence[int]
    slots: Sequence[int]
    read: Sample

    @property
    def automaton(self) -> Automaton:
        """Automaton of the answer."""
        return self.steps[0].automaton

    def laws(self, begin: int) -> list[int | None]:
        """Return the row of each place among distributions, of which its own start at `begin`."""
        numbers = count(begin)
        return [next(numbers) if hole else None for hole in self.holes]


def complete(stretches: Sequence[Stretch], logits: Tensor, tokens: Tensor) -> None:
    """Change tokens `[r]` of logits `[r, V]` so that those of each segment fit together.

    At temperature 0, take the most probable tokens, by dynamic programming (Suresh et al., 2025).
    Otherwise sample the product of the distributions given that the tokens fit: backward sums, then
    sampling from left to right (Dang and Ermon, 2026), with the noise of a separate step. If top-p,
    top-k and min-p leave no fitting tokens, they are not applied. Holes without a prediction count
    as uniform.

    Raises:
        ArithmeticError: if logits are not finite.
    """
    groups: dict[tuple[int, bool, int], list[Stretch]] = {}
    sizes: Counter[tuple[int, bool]] = Counter()
    for each in stretches:
        kind = id(each.automaton), each.read.sampling.temperature > 0
        groups.setdefault((*kind, sizes[kind] // MOST), []).append(each)
        sizes[kind] += len(each.rows) * logits.shape[1]
    for (_, sampled, _), group in groups.items():
        rows = torch.tensor([row for each in group for row in each.rows])
        distribution = logits[rows.clamp(min=0)]
        distribution[rows < 0] = 0
        laws = Law(
            group[0].automaton,
            drawn(group, distribution) if sampled else distribution,
            luck(group) if sampled else None,
        )
        begins = accumulate((len(each.rows) for each in group), initial=0)
        bundles = [b for each, at in zip(group, begins, strict=False) for b in path(each, at, laws)]
        chosen = torch.from_numpy(laws.tokens(np.array(bundles))).to(tokens.device)
        tokens[rows[rows >= 0]] = chosen[rows >= 0]


def drawn(stretches: Sequence[Stretch], logits: Tensor) -> Tensor:
    """Return log weights `[h, V]` for sampling, truncated unless nothing fits then.

    The first few holes of a segment mostly decide whether anything fits.
    """
    ends = [*accumulate((len(each.rows) for each in stretches), initial=0)]
    temperatures = [each.read.sampling.temperature for each in stretches for _ in each.rows]
    result = logits / logits.new_tensor(temperatures)[:, None]
    truncated = [number for number, each in enumerate(stretches) if each.read.sampling.cuts]
    for most in (FEW, len(logits)):
        if not truncated:
            break
        spans = [range(ends[n], min(ends[n] + most, ends[n + 1])) for n in truncated]
        rows = [row for span in spans for row in span]
        cut = Cut.of([stretches[n].read.sampling for n in truncated], spans, logits.device)
        shown = cut(logits[rows], slice(0, len(rows)))
        allowed = Law(stretches[0].automaton, shown, None).sums > -np.inf
        begins = [*accumulate(map(len, spans), initial=0)]
        parts = [slice(*edges) for edges in pairwise(begins)]
        fits = [possible(stretches[n], allowed[p]) for n, p in zip(truncated, parts, strict=True)]
        parts, truncated = [*compress(parts, fits)], [*compress(truncated, fits)]
    for number, part in zip(truncated, parts if truncated else (), strict=True):
        result[ends[number] : ends[number + 1]] = shown[part]
    return result


def luck(stretches: Sequence[Stretch]) -> Weights:
    """Return three uniform numbers for each hole, `[3, h]`."""
    samplings = [each.read.sampling for each in stretches]
    slots = [each.slots for each in stretches]
    steps = [-1 - 3 * each.read.step - turn for turn in range(3) for each in stretches]
    return fractions(noise_of(samplings * 3, steps, slots * 3)).reshape(3, -1)


def fractions(keys: Tensor) -> Weights:
    """Return uniform numbers below one for keys of 62 bits."""
    return (keys.numpy() >> 9) * 2.0**-53


class Law:
    """Log weights of tokens, classes and bundles in each hole.

    Args:
        automaton: automaton of the answers.
        log_weights: log weights of tokens, `[h, V]`.
        draws: three uniform numbers per hole, `[3, h]`, or None to take the best tokens.

    Attributes:
        values: log weights of tokens by class, `[h, V]`.
        weights: log weight of each class, `[h, C]`; that of its best token without `draws`.
        sums: log weight of each bundle, `[h, B]`, likewise.
    """

    def __init__(self, automaton: Automaton, log_weights: Tensor, draws: Weights | None) -> None:
        self.automaton = automaton
        self.luck = draws
        self.values = log_weights.cpu().numpy().take(automaton.order, axis=1)
        some, inside = automaton.some, automaton.inside
        self.weights = np.full(
            (len(log_weights), automaton.table.shape[1]), -np.inf, dtype=np.float32
        )
        self.weights[:, some] = self.added(self.values, automaton.same.counts[some])
        self.sums = self.added(self.weights.take(automaton.members, axis=1), inside.counts)

    def added(self, values: Weights, sizes: Ids) -> Weights:
        """Return the log weights of consecutive groups of these sizes."""
        begins = sizes.cumsum() - sizes
        tops = np.maximum.reduceat(values, begins, axis=1)
        if self.luck is None:
            return tops
        tops = np.maximum(tops, LOWEST)
        parts = np.exp(values - tops.repeat(sizes, axis=1))
        with np.errstate(divide="ignore"):
            return tops + np.log(np.add.reduceat(parts, begins, axis=1))

    def tokens(self, bundles: Ids) -> Ids:
        """Return one token of a bundle for each hole, `[h]`."""
        automaton, inside = self.automaton, self.automaton.inside
        rows, places = inside.of(bundles)
        kinds = automaton.members[places]
        own = kinds[self.picks(self.weights[rows, kinds], inside.counts[bundles], 1)]
        rows, places = automaton.same.of(own)
        picked = self.picks(self.values[rows, places], automaton.same.counts[own], 2)
        return automaton.order[places[picked]]

    def picks(self, weights: Weights, sizes: Ids, draw: int) -> Ids:
        """Return the index of the best or a sampled member of each hole's group."""
        ends = sizes.cumsum()
        begins = ends - sizes
        tops = np.maximum.reduceat(weights, begins).repeat(sizes)
        if self.luck is None:
            best = np.flatnonzero(weights == tops)
            return best[best.searchsorted(begins)]
        cumulative = np.exp(weights - tops, dtype=np.float64).cumsum()
        before = np.append(0.0, cumulative)[begins]
        found = cumulative.searchsorted(
            before + self.luck[draw] * (cumulative[ends - 1] - before), "right"
        )
        return found.clip(begins, ends - 1)

    def pick(self, weights: Weights, row: int) -> int:
        """Return the index of the best or a sampled move of a hole, by log weight."""
        if self.luck is None:
            return int(weights.argmax())
        cumulative = np.exp(weights - weights.max()).cumsum()
        return int(cumulative.searchsorted(self.luck[0, row] * cumulative[-1], "right"))


def possible(stretch: Stretch, allowed: Flags) -> bool:
    """Return whether any tokens fit, as far as allowed bundles `[h, B]` are given.

    The remaining places are not checked, because no move of a segment leads to a dead end.
    """
    reached = np.ones(1, dtype=bool)
    for step, row in zip(stretch.steps, stretch.laws(0), strict=True):
        if row is not None and row >= len(allowed):
            return True
        live = reached[step.owners]
        if row is not None:
            live &= allowed[row][step.bundles]
        reached = np.zeros(step.count, dtype=bool)
        reached[step.tos[live]] = True
        if not reached.any():
            return False
    return True


def path(stretch: Stretch, begin: int, distributions: Law) -> list[int]:
    """Return the bundle of each hole of a segment, whose distributions start at `begin`.

    Raises:
        ArithmeticError: if the weights are not finite.
    """
    steps, rows = stretch.steps, stretch.laws(begin)
    later: Weights = np.zeros(steps[-1].count)  # of the states after the last place
    step_weights = []
    add = greatest if distributions.luck is None else total
    for step, row in zip(reversed(steps), reversed(rows), strict=True):
        weights = later.take(step.tos)
        if row is not None:
            weights += distributions.sums[row].take(step.bundles)
        step_weights.append(weights)
        later = weights if step.alone else add(weights, step)
    if not later[0] > -np.inf:
        raise ArithmeticError("the model's logits are not finite numbers")
    state, bundles = 0, []
    for step, row, weights in zip(steps, rows, reversed(step_weights), strict=True):
        entry = state if step.alone else int(step.begins[state])
        if row is not None:
            if not step.alone and (end := int(step.ends[state])) - entry > 1:
                entry += distributions.pick(weights[entry:end], row)
            bundles.append(int(step.bundles[entry]))
        state = int(step.tos[entry])
    return bundles


def greatest(weights: Weights, step: Moves) -> Weights:
    """Return the best weight of each state."""
    return np.maximum.reduceat(weights, step.begins)


def total(weights: Weights, step: Moves) -> Weights:
    """Return the log of the summed weights of each state."""
    if len(weights) < SMALL:
        return np.logaddexp.reduceat(weights, step.begins)
    tops = np.maximum(np.maximum.reduceat(weights, step.begins), LOWEST)
    parts = np.exp(weights - tops[step.owners])
    with np.errstate(divide="ignore"):
        return tops + np.log(np.add.reduceat(parts, step.begins))
