"""The tokens of several holes at once: the most probable that fit, or an exact draw.

Shapes: h holes, V tokens, C classes of tokens, B bundles of classes.
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
"""Holes that are looked at before all others."""

SMALL = 200
"""Moves that are added up one by one, as that is less work than to look at all several times."""

MOST = 2**24
"""Logits, about, that are looked at together, so that they fit into memory several times."""

LOWEST = -1e38
"""Stands for the logarithm of nothing where a difference is taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Holes of an answer, with the tokens between them.

    Attributes:
        steps: what leads from place to place; in front of the first one state is live.
        holes: of each place, whether it is a hole.
        rows: of each hole the row that predicts it, -1 where none does.
        slots: of each hole.
        read: how its tokens are read.
    """

    steps: Sequence[Moves]
    holes: Sequence[bool]
    rows: Sequence[int]
    slots: Sequence[int]
    read: Sample

    @property
    def automaton(self) -> Automaton:
        """That of its answer."""
        return self.steps[0].automaton

    def laws(self, begin: int) -> list[int | None]:
        """Of each place, where the law of its hole is, if those of the stretch `begin` there."""
        numbers = count(begin)
        return [next(numbers) if hole else None for hole in self.holes]


def complete(stretches: Sequence[Stretch], logits: Tensor, tokens: Tensor) -> None:
    """Change tokens `[r]`, of logits `[r, V]`, so that those of each stretch fit together.

    At temperature 0 the most probable ones, by dynamic programming (Suresh et al., 2025). Else a
    draw of the product of their laws given that they fit: backward sums, then a draw from left to
    right (Dang and Ermon, 2026), with the noise of a step of its own. Where what top-p, top-k and
    min-p leave has no fitting tokens, the laws are not cut. Holes among them that were not
    predicted count as uniform. Raises `ArithmeticError` for logits that are no numbers.
    """
    groups: dict[tuple[int, bool, int], list[Stretch]] = {}
    sizes: Counter[tuple[int, bool]] = Counter()
    for each in stretches:
        kind = id(each.automaton), each.read.sampling.temperature > 0
        groups.setdefault((*kind, sizes[kind] // MOST), []).append(each)
        sizes[kind] += len(each.rows) * logits.shape[1]
    for (_, warm, _), own in groups.items():
        rows = torch.tensor([row for each in own for row in each.rows])
        law = logits[rows.clamp(min=0)]
        law[rows < 0] = 0
        laws = Law(own[0].automaton, drawn(own, law) if warm else law, luck(own) if warm else None)
        begins = accumulate((len(each.rows) for each in own), initial=0)
        bundles = [b for each, at in zip(own, begins, strict=False) for b in path(each, at, laws)]
        chosen = torch.from_numpy(laws.tokens(np.array(bundles))).to(tokens.device)
        tokens[rows[rows >= 0]] = chosen[rows >= 0]


def drawn(stretches: Sequence[Stretch], law: Tensor) -> Tensor:
    """Logarithms `[h, V]` of what tokens are drawn by: cut, or where nothing then fits, not.

    The first few holes of a stretch mostly say so.
    """
    ends = [*accumulate((len(each.rows) for each in stretches), initial=0)]
    heat = [each.read.sampling.temperature for each in stretches for _ in each.rows]
    result = law / law.new_tensor(heat)[:, None]
    left = [number for number, each in enumerate(stretches) if each.read.sampling.cuts]
    for most in (FEW, len(law)):
        if not left:
            break
        spans = [range(ends[n], min(ends[n] + most, ends[n + 1])) for n in left]
        rows = [row for span in spans for row in span]
        cut = Cut.of([stretches[n].read.sampling for n in left], spans, law.device)
        shown = cut(law[rows], slice(0, len(rows)))
        allowed = Law(stretches[0].automaton, shown, None).sums > -np.inf
        begins = [*accumulate(map(len, spans), initial=0)]
        parts = [slice(*edges) for edges in pairwise(begins)]
        fits = [possible(stretches[n], allowed[p]) for n, p in zip(left, parts, strict=True)]
        parts, left = [*compress(parts, fits)], [*compress(left, fits)]
    for number, part in zip(left, parts if left else (), strict=True):
        result[ends[number] : ends[number + 1]] = shown[part]
    return result


def luck(stretches: Sequence[Stretch]) -> Weights:
    """Three uniform numbers for each hole, `[3, h]`."""
    samplings = [each.read.sampling for each in stretches]
    slots = [each.slots for each in stretches]
    turns = [-1 - 3 * each.read.step - turn for turn in range(3) for each in stretches]
    return fractions(noise_of(samplings * 3, turns, slots * 3)).reshape(3, -1)


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
        self.weights[:, some] = self.added(self.values, automaton.same.counts[some])
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

    def tokens(self, bundles: Ids) -> Ids:
        """One of a bundle for each hole, `[h]`."""
        automaton, inside = self.automaton, self.automaton.inside
        rows, places = inside.of(bundles)
        kinds = automaton.members[places]
        own = kinds[self.picks(self.weights[rows, kinds], inside.counts[bundles], 1)]
        rows, places = automaton.same.of(own)
        picked = self.picks(self.values[rows, places], automaton.same.counts[own], 2)
        return automaton.order[places[picked]]

    def picks(self, worth: Weights, sizes: Ids, turn: int) -> Ids:
        """The places of the best of neighbours, so many for each hole, or of drawn ones."""
        ends = sizes.cumsum()
        begins = ends - sizes
        tops = np.maximum.reduceat(worth, begins).repeat(sizes)
        if self.luck is None:
            best = np.flatnonzero(worth == tops)
            return best[best.searchsorted(begins)]
        mass = np.exp(worth - tops, dtype=np.float64).cumsum()
        before = np.append(0.0, mass)[begins]
        found = mass.searchsorted(before + self.luck[turn] * (mass[ends - 1] - before), "right")
        return found.clip(begins, ends - 1)

    def pick(self, worth: Weights, row: int) -> int:
        """The place of the best move of a hole, or of one drawn by logarithms of its weight."""
        if self.luck is None:
            return int(worth.argmax())
        mass = np.exp(worth - worth.max()).cumsum()
        return int(mass.searchsorted(self.luck[0, row] * mass[-1], "right"))


def possible(stretch: Stretch, allowed: Flags) -> bool:
    """Whether anything fits, as far as bundles `[h, B]` of holes are known: mostly not.

    What follows is not looked at, as nothing in a stretch leads nowhere.
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


def path(stretch: Stretch, begin: int, law: Law) -> list[int]:
    """The bundle that each hole of a stretch takes, whose laws `begin` there.

    Raises `ArithmeticError` where the weights are no numbers.
    """
    steps, rows = stretch.steps, stretch.laws(begin)
    rest: Weights = np.zeros(steps[-1].count)  # of the states behind the last place
    worths = []
    add = greatest if law.luck is None else total
    for step, row in zip(reversed(steps), reversed(rows), strict=True):
        worth = rest.take(step.tos)
        if row is not None:
            worth += law.sums[row].take(step.bundles)
        worths.append(worth)
        rest = worth if step.alone else add(worth, step)
    if not rest[0] > -np.inf:
        raise ArithmeticError("the model's logits are not finite numbers")
    state, taken = 0, []
    for step, row, worth in zip(steps, rows, reversed(worths), strict=True):
        entry = state if step.alone else int(step.begins[state])
        if row is not None:
            if not step.alone and (end := int(step.ends[state])) - entry > 1:
                entry += law.pick(worth[entry:end], row)
            taken.append(int(step.bundles[entry]))
        state = int(step.tos[entry])
    return taken


def greatest(worth: Weights, step: Moves) -> Weights:
    """The best of what each state has."""
    return np.maximum.reduceat(worth, step.begins)


def total(worth: Weights, step: Moves) -> Weights:
    """The logarithm of all that each state has."""
    if len(worth) < SMALL:
        return np.logaddexp.reduceat(worth, step.begins)
    tops = np.maximum(np.maximum.reduceat(worth, step.begins), LOWEST)
    parts = np.exp(worth - tops[step.owners])
    with np.errstate(divide="ignore"):
        return tops + np.log(np.add.reduceat(parts, step.begins))
