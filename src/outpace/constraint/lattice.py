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

from outpace.constraint.automaton import TokenAutomaton
from outpace.constraint.dfa import IndexArray, StateFlags
from outpace.constraint.reach import StateMoves
from outpace.decoding.sampling import Sample, slot_noise_keys
from outpace.decoding.truncation import LogitTruncation

LogWeights = NDArray[np.floating[Any]]

FIRST_HOLES = 4
"""Holes that are checked before all others."""

MAX_DIRECT_MOVES = 200
"""Moves below which a direct log-sum-exp is faster than a shifted sum."""

MAX_BATCH_LOGITS = 2**24
"""Approximate number of logits processed together, so that several copies fit into memory."""

LOG_ZERO = -1e38
"""Logarithm of zero where differences are taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HoleSegment:
    """Consecutive places of an answer: holes and the tokens between them.

    Attributes:
        steps: moves from place to place; a single state is possible before the first.
        holes: whether each place is a hole.
        rows: row that predicts each hole, or -1.
        slots: slot of each hole.
        read: how the tokens are read.
    """

    steps: Sequence[StateMoves]
    holes: Sequence[bool]
    rows: Sequence[int]
    slots: Sequence[int]
    read: Sample

    @property
    def automaton(self) -> TokenAutomaton:
        """Automaton of the answer."""
        return self.steps[0].automaton

    def distribution_rows(self, begin: int) -> list[int | None]:
        """Return the row of each place among distributions, of which its own start at `begin`."""
        numbers = count(begin)
        return [next(numbers) if hole else None for hole in self.holes]


def complete_segments(stretches: Sequence[HoleSegment], logits: Tensor, tokens: Tensor) -> None:
    """Change tokens `[r]` of logits `[r, V]` so that those of each segment fit together.

    At temperature 0, take the most probable tokens, by dynamic programming (Suresh et al., 2025).
    Otherwise sample the product of the distributions given that the tokens fit: backward sums, then
    sampling from left to right (Dang and Ermon, 2026), with the noise of a separate step. If top-p,
    top-k and min-p leave no fitting tokens, they are not applied. Holes without a prediction count
    as uniform.

    Raises:
        ArithmeticError: if logits are not finite.
    """
    groups: dict[tuple[int, bool, int], list[HoleSegment]] = {}
    sizes: Counter[tuple[int, bool]] = Counter()
    for each in stretches:
        kind = id(each.automaton), each.read.sampling.temperature > 0
        groups.setdefault((*kind, sizes[kind] // MAX_BATCH_LOGITS), []).append(each)
        sizes[kind] += len(each.rows) * logits.shape[1]
    for (_, sampled, _), group in groups.items():
        rows = torch.tensor([row for each in group for row in each.rows])
        distribution = logits[rows.clamp(min=0)]
        distribution[rows < 0] = 0
        laws = HoleDistributions(
            group[0].automaton,
            sampling_log_weights(group, distribution) if sampled else distribution,
            uniform_draws(group) if sampled else None,
        )
        begins = accumulate((len(each.rows) for each in group), initial=0)
        bundles = [
            b for each, at in zip(group, begins, strict=False) for b in choose_path(each, at, laws)
        ]
        chosen = torch.from_numpy(laws.choose_tokens(np.array(bundles))).to(tokens.device)
        tokens[rows[rows >= 0]] = chosen[rows >= 0]


def sampling_log_weights(stretches: Sequence[HoleSegment], logits: Tensor) -> Tensor:
    """Return log weights `[h, V]` for sampling, truncated unless nothing fits then.

    The first few holes of a segment mostly decide whether anything fits.
    """
    ends = [*accumulate((len(each.rows) for each in stretches), initial=0)]
    temperatures = [each.read.sampling.temperature for each in stretches for _ in each.rows]
    result = logits / logits.new_tensor(temperatures)[:, None]
    truncated = [number for number, each in enumerate(stretches) if each.read.sampling.is_truncated]
    for most in (FIRST_HOLES, len(logits)):
        if not truncated:
            break
        spans = [range(ends[n], min(ends[n] + most, ends[n + 1])) for n in truncated]
        rows = [row for span in spans for row in span]
        cut = LogitTruncation.from_requests(
            [stretches[n].read.sampling for n in truncated], spans, logits.device
        )
        shown = cut(logits[rows], slice(0, len(rows)))
        allowed = HoleDistributions(stretches[0].automaton, shown, None).sums > -np.inf
        begins = [*accumulate(map(len, spans), initial=0)]
        parts = [slice(*edges) for edges in pairwise(begins)]
        fits = [
            is_feasible(stretches[n], allowed[p]) for n, p in zip(truncated, parts, strict=True)
        ]
        parts, truncated = [*compress(parts, fits)], [*compress(truncated, fits)]
    for number, part in zip(truncated, parts if truncated else (), strict=True):
        result[ends[number] : ends[number + 1]] = shown[part]
    return result


def uniform_draws(stretches: Sequence[HoleSegment]) -> LogWeights:
    """Return three uniform numbers for each hole, `[3, h]`."""
    samplings = [each.read.sampling for each in stretches]
    slots = [each.slots for each in stretches]
    steps = [-1 - 3 * each.read.step - turn for turn in range(3) for each in stretches]
    return unit_fractions(slot_noise_keys(samplings * 3, steps, slots * 3)).reshape(3, -1)


def unit_fractions(keys: Tensor) -> LogWeights:
    """Return uniform numbers below one for keys of 62 bits."""
    return (keys.numpy() >> 9) * 2.0**-53


class HoleDistributions:
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

    def __init__(
        self, automaton: TokenAutomaton, log_weights: Tensor, draws: LogWeights | None
    ) -> None:
        self.automaton = automaton
        self.draws = draws
        self.values = log_weights.cpu().numpy().take(automaton.token_order, axis=1)
        some, inside = automaton.used_classes, automaton.bundle_spans
        self.weights = np.full(
            (len(log_weights), automaton.table.shape[1]), -np.inf, dtype=np.float32
        )
        self.weights[:, some] = self.reduce_groups(self.values, automaton.class_spans.counts[some])
        self.sums = self.reduce_groups(
            self.weights.take(automaton.bundle_classes, axis=1), inside.counts
        )

    def reduce_groups(self, values: LogWeights, sizes: IndexArray) -> LogWeights:
        """Return the log weights of consecutive groups of these sizes."""
        begins = sizes.cumsum() - sizes
        tops = np.maximum.reduceat(values, begins, axis=1)
        if self.draws is None:
            return tops
        tops = np.maximum(tops, LOG_ZERO)
        parts = np.exp(values - tops.repeat(sizes, axis=1))
        with np.errstate(divide="ignore"):
            return tops + np.log(np.add.reduceat(parts, begins, axis=1))

    def choose_tokens(self, bundles: IndexArray) -> IndexArray:
        """Return one token of a bundle for each hole, `[h]`."""
        automaton, inside = self.automaton, self.automaton.bundle_spans
        rows, places = inside.pairs_of(bundles)
        kinds = automaton.bundle_classes[places]
        own = kinds[self.choose_members(self.weights[rows, kinds], inside.counts[bundles], 1)]
        rows, places = automaton.class_spans.pairs_of(own)
        picked = self.choose_members(
            self.values[rows, places], automaton.class_spans.counts[own], 2
        )
        return automaton.token_order[places[picked]]

    def choose_members(self, weights: LogWeights, sizes: IndexArray, draw: int) -> IndexArray:
        """Return the index of the best or a sampled member of each hole's group."""
        ends = sizes.cumsum()
        begins = ends - sizes
        tops = np.maximum.reduceat(weights, begins).repeat(sizes)
        if self.draws is None:
            best = np.flatnonzero(weights == tops)
            return best[best.searchsorted(begins)]
        cumulative = np.exp(weights - tops, dtype=np.float64).cumsum()
        before = np.append(0.0, cumulative)[begins]
        found = cumulative.searchsorted(
            before + self.draws[draw] * (cumulative[ends - 1] - before), "right"
        )
        return found.clip(begins, ends - 1)

    def choose_move(self, weights: LogWeights, row: int) -> int:
        """Return the index of the best or a sampled move of a hole, by log weight."""
        if self.draws is None:
            return int(weights.argmax())
        cumulative = np.exp(weights - weights.max()).cumsum()
        return int(cumulative.searchsorted(self.draws[0, row] * cumulative[-1], "right"))


def is_feasible(stretch: HoleSegment, allowed: StateFlags) -> bool:
    """Return whether any tokens fit, as far as allowed bundles `[h, B]` are given.

    The remaining places are not checked, because no move of a segment leads to a dead end.
    """
    reached = np.ones(1, dtype=bool)
    for step, row in zip(stretch.steps, stretch.distribution_rows(0), strict=True):
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


def choose_path(stretch: HoleSegment, begin: int, distributions: HoleDistributions) -> list[int]:
    """Return the bundle of each hole of a segment, whose distributions start at `begin`.

    Raises:
        ArithmeticError: if the weights are not finite.
    """
    steps, rows = stretch.steps, stretch.distribution_rows(begin)
    later: LogWeights = np.zeros(steps[-1].count)  # of the states after the last place
    step_weights = []
    add = max_by_state if distributions.draws is None else logsumexp_by_state
    for step, row in zip(reversed(steps), reversed(rows), strict=True):
        weights = later.take(step.tos)
        if row is not None:
            weights += distributions.sums[row].take(step.bundles)
        step_weights.append(weights)
        later = weights if step.is_deterministic else add(weights, step)
    if not later[0] > -np.inf:
        raise ArithmeticError("the model's logits are not finite numbers")
    state, bundles = 0, []
    for step, row, weights in zip(steps, rows, reversed(step_weights), strict=True):
        entry = state if step.is_deterministic else int(step.begins[state])
        if row is not None:
            if not step.is_deterministic and (end := int(step.ends[state])) - entry > 1:
                entry += distributions.choose_move(weights[entry:end], row)
            bundles.append(int(step.bundles[entry]))
        state = int(step.tos[entry])
    return bundles


def max_by_state(weights: LogWeights, step: StateMoves) -> LogWeights:
    """Return the best weight of each state."""
    return np.maximum.reduceat(weights, step.begins)


def logsumexp_by_state(weights: LogWeights, step: StateMoves) -> LogWeights:
    """Return the log of the summed weights of each state."""
    if len(weights) < MAX_DIRECT_MOVES:
        return np.logaddexp.reduceat(weights, step.begins)
    tops = np.maximum(np.maximum.reduceat(weights, step.begins), LOG_ZERO)
    parts = np.exp(weights - tops[step.owners])
    with np.errstate(divide="ignore"):
        return tops + np.log(np.add.reduceat(parts, step.begins))
