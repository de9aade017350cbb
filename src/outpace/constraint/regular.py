"""Constraints by an automaton over tokens, for any order of decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, count, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.constraint.automaton import HOLE_CLASS, UNREACHABLE, TokenAutomaton
from outpace.constraint.dfa import IndexArray, StateFlags
from outpace.decoding import Request
from outpace.decoding.processor import BANNED_LOGIT
from outpace.decoding.sampling import JointRows, LogitTruncation, Sample, slot_noise_keys

MAX_SET_BYTES = 64 * 2**20
"""Maximum bytes of cached sets and moves per automaton."""


class StateMoves:
    """Transitions from one set of states to another, by any token or one class."""

    def __init__(
        self, automaton: TokenAutomaton, heads: StateFlags, tails: StateFlags, kind: int
    ) -> None:
        states = np.flatnonzero(heads)
        which, targets, places = automaton.transitions_from(states, kind)
        live = tails[targets]
        which, targets = which[live], targets[live]
        self.automaton = automaton
        self.bundles = automaton.pair_bundles[places[live]] if kind == HOLE_CLASS else which[:0]
        """Bundle of classes of each move, `[n]`; empty if a class is given."""
        self.begins = np.flatnonzero(np.diff(which, prepend=-1))
        self.ends: IndexArray = np.append(self.begins, len(which))[1:]
        """End of the moves of each source state, `[s]`."""
        self.owners = np.repeat(np.arange(len(self.begins)), self.ends - self.begins)
        """Index of the source state of each move, `[n]`."""
        self.is_deterministic = len(self.begins) == len(which)
        """Whether each source state has one move."""
        self.single = int(states[which[0]]) if len(self.begins) == 1 else -1
        """The only source state, or -1."""
        found = np.zeros(len(tails), dtype=bool)
        found[targets] = True
        self.tos = (found.cumsum() - 1)[targets]
        """Index of each target among all target states, `[n]`."""
        self.count = int(found.sum())
        """Number of target states."""
        self.mask: Tensor | None = None

    @property
    def token_classes(self) -> IndexArray:
        return self.automaton.bundle_classes[
            self.automaton.bundle_spans.pairs_of(np.unique(self.bundles))[1]
        ]

    @property
    def banned_tokens(self) -> Tensor:
        if self.mask is None:
            allowed = np.zeros(self.automaton.table.shape[1], dtype=bool)
            allowed[self.token_classes] = True
            self.mask = torch.from_numpy(~allowed[self.automaton.classes])
        return self.mask

    @property
    def single_token(self) -> int | None:
        if len(self.tos) != 1 or len(self.token_classes) != 1:
            return None
        same, kind = self.automaton.class_spans, self.token_classes[0]
        return (
            int(self.automaton.token_order[same.firsts[kind]]) if same.counts[kind] == 1 else None
        )


@dataclass(slots=True, eq=False)
class StateSet:
    """A set of states, with its cached successors and predecessors by class, and its answers."""

    flags: StateFlags
    after: dict[int, StateSet] = field(default_factory=dict)
    before: dict[int, StateSet] = field(default_factory=dict)
    moves: dict[tuple[StateSet, int], StateMoves] = field(default_factory=dict)
    answer: StateSet | None = None


class StateSets:
    """Distinct sets of states of an automaton, dropped together when they take too much memory."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.max_distance = automaton.max_distance
        self.clear_sets()

    def clear_sets(self) -> None:
        """Drop all sets; those in use remain valid."""
        self.by_flags: dict[bytes, StateSet] = {}
        self.by_state: dict[int, StateSet] = {}
        self.by_distance: dict[tuple[int, int | None], StateSet] = {}
        self.used_bytes = 0

    def lookup_flags(self, flags: StateFlags) -> StateSet:
        key = flags.tobytes()
        if key not in self.by_flags:
            self.count_bytes(len(flags))
            self.by_flags[key] = StateSet(flags)
        return self.by_flags[key]

    def count_bytes(self, size: int) -> None:
        if self.used_bytes > MAX_SET_BYTES:
            self.clear_sets()
        self.used_bytes += size

    def single_state(self, state: int) -> StateSet:
        if state not in self.by_state:
            self.by_state[state] = self.lookup_flags(
                np.arange(len(self.automaton.tokens_to_end)) == state
            )
        return self.by_state[state]

    def states_within(self, left: int, thoughts: int | None = None) -> StateSet:
        """Return the states from which an answer can be finished with `left` tokens.

        Its thoughts end within `thoughts` tokens, if that is not None.
        """
        left = min(left, self.max_distance)
        if thoughts is not None:
            thoughts = min(max(thoughts, 0), len(self.automaton.thought_distances) - 1)
        if (key := (left, thoughts)) not in self.by_distance:
            self.by_distance[key] = self.lookup_flags(self.automaton.can_finish(*key))
        return self.by_distance[key]

    def states_after(self, states: StateSet, kind: int) -> StateSet:
        if kind not in states.after:
            states.after[kind] = self.lookup_flags(self.automaton.successors(states.flags, kind))
        return states.after[kind]

    def states_before(self, states: StateSet, kind: int) -> StateSet:
        if kind not in states.before:
            states.before[kind] = self.lookup_flags(self.automaton.predecessors(states.flags, kind))
        return states.before[kind]

    def answer_states(self, states: StateSet) -> StateSet:
        """Return those of some states that are not before the end of thoughts."""
        if states.answer is None:
            within = self.automaton.thought_distances[0] < UNREACHABLE
            states.answer = self.lookup_flags(states.flags & within)
        return states.answer

    def moves_between(self, heads: StateSet, tails: StateSet, kind: int = HOLE_CLASS) -> StateMoves:
        key = tails, kind
        if key not in heads.moves:
            found = heads.moves[key] = StateMoves(self.automaton, heads.flags, tails.flags, kind)
            self.count_bytes(32 * len(found.tos) + len(self.automaton.classes))
        return heads.moves[key]


class ReachableStates:
    """Possible states before each place of an answer.

    Args:
        sets: cached sets of the automaton.
        states: states before the places up to `first`: the first hole, or the first token that
            is part of no answer.
        kinds: classes from there on, or `HOLE_CLASS`; all later places are holes.
        room: number of places.
        deadline: place before which thoughts end, or None.
        both: whether tokens after a hole constrain it.
    """

    def __init__(
        self,
        sets: StateSets,
        states: Sequence[int],
        kinds: Sequence[int],
        *,
        room: int,
        deadline: int | None,
        both: bool,
    ) -> None:
        self.sets = sets
        self.states = states
        self.first = len(states) - 1
        self.kinds = kinds
        self.room, self.deadline = room, deadline
        self.heads = [sets.single_state(states[-1])]
        self.tails: list[StateSet] = []  # of the last places, in descending order
        filled = [place for place, kind in enumerate(kinds, self.first) if kind != HOLE_CLASS]
        self.last_filled_end = (
            filled[-1] + 1 if both and filled else 0
        )  # first place after the last token

    def class_at(self, place: int) -> int:
        """Return the class of the token at a place, or `HOLE_CLASS`."""
        offset = place - self.first
        return self.kinds[offset] if 0 <= offset < len(self.kinds) else HOLE_CLASS

    def head_states(self, place: int) -> StateSet:
        if place < self.first:
            return self.sets.single_state(self.states[place])
        while len(self.heads) <= place - self.first:
            at = self.first + len(self.heads)
            found = self.sets.states_after(self.heads[-1], self.class_at(at - 1))
            self.heads.append(self.without_late_thoughts(found, at))
        return self.heads[place - self.first]

    def states_within_limits(self, place: int) -> StateSet:
        thoughts = None if self.deadline is None else self.deadline - place
        return self.sets.states_within(self.room - place, thoughts)

    def states_leading_to(self, following: StateSet, place: int) -> StateSet:
        found = self.sets.states_before(following, self.class_at(place))
        return self.without_late_thoughts(found, place)

    def without_late_thoughts(self, states: StateSet, place: int) -> StateSet:
        """Return those of some states in which thoughts may be before a place."""
        if self.deadline is None or place < self.deadline:
            return states
        return self.sets.answer_states(states)

    def tail_states(self, place: int) -> StateSet:
        if place >= self.last_filled_end or place <= self.first:
            return self.states_within_limits(place)
        while len(self.tails) < self.last_filled_end - place:
            at = self.last_filled_end - len(self.tails) - 1
            following = self.tails[-1] if self.tails else self.tail_states(self.last_filled_end)
            self.tails.append(self.states_leading_to(following, at))
        return self.tails[self.last_filled_end - place - 1]

    def banned_at(self, place: int) -> Tensor:
        """Return the tokens that no answer has at a place, `bool[V]`."""
        return self.sets.moves_between(
            self.head_states(place), self.tail_states(place + 1)
        ).banned_tokens

    def moves_until(self, end: int) -> list[StateMoves]:
        """Return the moves from place to place, from the first hole to `end`."""
        tails = [self.tail_states(end)]
        for place in range(end - 1, self.first, -1):
            tails.append(self.states_leading_to(tails[-1], place))
        return [
            self.sets.moves_between(self.head_states(place), tail, self.class_at(place))
            for place, tail in enumerate(reversed(tails), self.first)
        ]


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
    """Consecutive places of an answer: holes and the tokens between them."""

    steps: Sequence[StateMoves]
    """Moves from place to place; a single state is possible before the first."""
    holes: Sequence[bool]
    """Whether each place is a hole."""
    rows: Sequence[int]
    """Row that predicts each hole, or -1."""
    slots: Sequence[int]
    """Slot of each hole."""
    read: Sample
    """How the tokens are read."""

    @property
    def automaton(self) -> TokenAutomaton:
        return self.steps[0].automaton

    def distribution_rows(self, begin: int) -> list[int | None]:
        """Return the row of each place among distributions, of which its own start at `begin`."""
        numbers = count(begin)
        return [next(numbers) if hole else None for hole in self.holes]


def complete_segments(stretches: Sequence[HoleSegment], logits: Tensor, tokens: Tensor) -> None:
    """Change tokens `[r]` of logits `[r, V]` so that those of each segment fit together."""
    # At temperature 0, take the most probable tokens, by dynamic programming (Suresh et al., 2025).
    # Otherwise sample the product of the distributions given that the tokens fit: backward sums,
    # then sampling from left to right (Dang and Ermon, 2026), with the noise of a separate step. If
    # top-p, top-k and min-p leave no fitting tokens, they are not applied. Holes without a
    # prediction count as uniform.
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
    """Return log weights `[h, V]` for sampling, truncated unless nothing fits then."""
    # The first few holes of a segment mostly decide whether anything fits.
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
    samplings = [each.read.sampling for each in stretches]
    slots = [each.slots for each in stretches]
    steps = [-1 - 3 * each.read.step - turn for turn in range(3) for each in stretches]
    keys = slot_noise_keys(samplings * 3, steps, slots * 3)  # of 62 bits
    return ((keys.numpy() >> 9) * 2.0**-53).reshape(3, -1)


class HoleDistributions:
    """Log weights of tokens, classes and bundles in each hole.

    Args:
        automaton: automaton of the answers.
        log_weights: log weights of tokens, `[h, V]`.
        draws: three uniform numbers per hole, `[3, h]`, or None to take the best tokens.
    """

    def __init__(
        self, automaton: TokenAutomaton, log_weights: Tensor, draws: LogWeights | None
    ) -> None:
        self.automaton = automaton
        self.draws = draws
        self.values = log_weights.cpu().numpy().take(automaton.token_order, axis=1)
        """Log weights of tokens by class, `[h, V]`."""
        some, inside = automaton.used_classes, automaton.bundle_spans
        self.weights = np.full(
            (len(log_weights), automaton.table.shape[1]), -np.inf, dtype=np.float32
        )
        """Log weight of each class, `[h, C]`; that of its best token without `draws`."""
        self.weights[:, some] = self.reduce_groups(self.values, automaton.class_spans.counts[some])
        self.sums = self.reduce_groups(
            self.weights.take(automaton.bundle_classes, axis=1), inside.counts
        )
        """Log weight of each bundle, `[h, B]`, likewise."""

    def reduce_groups(self, values: LogWeights, sizes: IndexArray) -> LogWeights:
        begins = sizes.cumsum() - sizes
        tops = np.maximum.reduceat(values, begins, axis=1)
        if self.draws is None:
            return tops
        tops = np.maximum(tops, LOG_ZERO)
        parts = np.exp(values - tops.repeat(sizes, axis=1))
        with np.errstate(divide="ignore"):
            return tops + np.log(np.add.reduceat(parts, begins, axis=1))

    def choose_tokens(self, bundles: IndexArray) -> IndexArray:
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
    """Return whether any tokens fit, as far as allowed bundles `[h, B]` are given."""
    # The remaining places are not checked, because no move of a segment leads to a dead end.
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
    """Return the bundle of each hole of a segment, whose distributions start at `begin`."""
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
    return np.maximum.reduceat(weights, step.begins)


def logsumexp_by_state(weights: LogWeights, step: StateMoves) -> LogWeights:
    if len(weights) < MAX_DIRECT_MOVES:
        return np.logaddexp.reduceat(weights, step.begins)
    tops = np.maximum(np.maximum.reduceat(weights, step.begins), LOG_ZERO)
    parts = np.exp(weights - tops[step.owners])
    with np.errstate(divide="ignore"):
        return tops + np.log(np.add.reduceat(parts, step.begins))


class TokenLanguage:
    """Strings that an automaton accepts, with cached sets of its states."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.sets = StateSets(automaton)
        self.no_ban = torch.zeros(len(automaton.classes), dtype=torch.bool)

    @property
    def cached_bytes(self) -> int:
        """Memory that it holds at present, with the sets that answers have added."""
        return self.automaton.num_bytes + len(self.no_ban) + self.sets.used_bytes

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the shortest answer."""
        return self.automaton.min_tokens

    def build_constraint(
        self, *, begin: int, limit: int, mask_id: int, both: bool, thoughts: int | None = None
    ) -> RegularConstraint:
        """Create the constraint of one answer in slots `begin` to `limit`.

        If `thoughts` is not None, the text that ends thoughts begins after this many tokens, or
        earlier.
        """
        if 0 <= mask_id < len(self.no_ban) and self.automaton.classes[mask_id]:
            mask_id = -1  # a token that answers may contain cannot mark holes
        deadline = None if thoughts is None else self.automaton.thought_deadline(thoughts)
        return RegularConstraint(
            language=self, begin=begin, limit=limit, mask_id=mask_id, both=both, deadline=deadline
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RegularConstraint:
    """Constrain one answer to an automaton exactly, for any order of filling."""

    # The answer begins at slot `begin` and must be complete before slot `limit`. In each row,
    # tokens are banned that no answer has there, given all tokens so far, or without `both` only
    # those before the row. Holes that are filled together receive the most probable tokens that
    # fit. Above temperature 0 they are an exact sample of the product of the predictions, given
    # that the tokens fit.

    language: TokenLanguage
    begin: int
    limit: int
    mask_id: int
    both: bool
    deadline: int | None = None
    """Place of the answer before which its thoughts end, or None."""
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """Tokens of the last walked answer, and the state after each."""
    last_reach: tuple[Sequence[int], ReachableStates] | None = None
    """The last answer, without trailing holes, and its states; a ban and its read use the same."""

    @property
    def automaton(self) -> TokenAutomaton:
        return self.language.automaton

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`, each row according to the tokens of `text`."""
        answer = text[self.begin : self.limit]
        reach = self.reachable_states(answer)
        broken = reach.first < self.first_hole(answer)
        banned = [
            # Nothing is constrained after an invalid token or the limit.
            self.language.no_ban
            if slot >= self.limit or (broken and slot - self.begin > reach.first)
            else reach.banned_at(slot - self.begin)
            for slot in slots
        ]
        mask = torch.stack(banned).to(logits.device)
        logits[:, : mask.shape[1]].masked_fill_(mask, BANNED_LOGIT)

    def forced_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow a prefix, without an end-of-sequence."""
        reach, found = self.reachable_states(ids[self.begin :]), list[int]()
        sets, state = reach.sets, reach.states[-1]
        for place in range(len(ids) - self.begin + 1, reach.room):
            tails = reach.states_within_limits(place)
            token = sets.moves_between(sets.single_state(state), tails).single_token
            if token is None:
                break
            state = int(self.automaton.table[state, self.automaton.classes[token]])
            if state == self.automaton.end:
                break
            found.append(token)
        return found

    def first_hole(self, answer: Sequence[int]) -> int:
        return answer.index(self.mask_id) if self.mask_id in answer else len(answer)

    def walk_answer(self, tokens: Sequence[int]) -> list[int]:
        """Return the state after each token that is part of an answer; reuse the last walk."""
        same = len(self.tokens)
        if tokens[:same] != self.tokens:
            pairs = enumerate(zip(tokens, self.tokens, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(same, len(tokens)))
        if same <= len(self.states):
            del self.states[same:]
            last = self.states[-1] if self.states else 0
            self.states += self.automaton.walk_tokens(tokens[same:], last)
        self.tokens = list(tokens)
        return self.states

    def reachable_states(self, answer: Sequence[int]) -> ReachableStates:
        first = self.first_hole(answer)
        rest = answer[first:]
        if rest.count(self.mask_id) == len(rest):
            answer = answer[:first]
        if self.last_reach is None or self.last_reach[0] != answer:
            self.last_reach = answer, self.build_reachable(answer, first)
        return self.last_reach[1]

    def build_reachable(self, answer: Sequence[int], first: int) -> ReachableStates:
        rest = answer[first:]
        classes = self.automaton.classes  # the mask may be outside the vocabulary
        holes = [HOLE_CLASS if token == self.mask_id else int(classes[token]) for token in rest]
        return ReachableStates(
            self.language.sets,
            [0, *self.walk_answer(answer[:first])],
            holes,
            room=self.limit - self.begin,
            deadline=self.deadline,
            both=self.both,
        )

    @staticmethod
    def choose_jointly(asked: Sequence[JointRows], logits: Tensor, tokens: Tensor) -> None:
        """Change tokens so that they fit together; keep segments that already fit."""
        # A sample that is kept if it fits, and otherwise replaced by an independent one given that
        # it fits, has the distribution of the latter. The same holds segment by segment.
        chosen = tokens.tolist()
        complete_segments(
            [each for fit in asked for each in fit.constraint.broken_segments(fit, chosen)],
            logits,
            tokens,
        )

    def broken_segments(self, fit: JointRows, tokens: Sequence[int]) -> Iterator[HoleSegment]:
        """Yield the segments of holes in which the `tokens` of all rows fit no answer."""
        # A single state is possible before each segment, so that segments are independent.
        assert fit.read.joint is not None
        reach = self.reachable_states(fit.read.joint.text[self.begin : self.limit])
        slots = zip(fit.slots, fit.rows, strict=True)
        rows = {slot - self.begin: row for slot, row in slots if slot < self.limit}
        rows = {
            p: rows[p] for p in sorted(rows) if p >= reach.first and reach.class_at(p) == HOLE_CLASS
        }
        if not rows:
            return
        places = range(reach.first, max(rows) + 1)
        steps = reach.moves_until(places.stop)
        for begin, end in self.broken_ranges(reach, steps, rows, tokens):
            own = places[begin:end]
            holes = [place for place in own if reach.class_at(place) == HOLE_CLASS]
            if any(place in rows for place in holes):
                yield HoleSegment(
                    steps=steps[begin:end],
                    holes=[place in holes for place in own],
                    rows=[rows.get(place, -1) for place in holes],
                    slots=[self.begin + place for place in holes],
                    read=fit.read,
                )

    def broken_ranges(
        self,
        reach: ReachableStates,
        steps: Sequence[StateMoves],
        rows: Mapping[int, int],
        tokens: Sequence[int],
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges of these segments among steps; `rows` are those of places."""
        automaton, begin, state = self.automaton, 0, reach.states[-1]
        for number, step in enumerate(steps):
            if step.single >= 0 and number > begin:
                if state != step.single:
                    yield begin, number
                begin, state = number, step.single
            place = reach.first + number
            token_class = (
                automaton.classes[tokens[rows[place]]] if place in rows else reach.class_at(place)
            )
            state = (
                -1
                if state < 0 or token_class == HOLE_CLASS
                else int(automaton.table[state, token_class])
            )
        if state < 0 or not reach.tail_states(reach.first + len(steps)).flags[state]:
            yield begin, len(steps)

    def check(self, request: Request) -> None:
        """Raise `ValueError` if the committed tokens do not begin an answer."""
        tokens = request.tokens
        states = self.walk_answer(tokens)
        if len(states) < len(tokens):
            raise ValueError(
                f"token {tokens[len(states)]} at slot {self.begin + len(states)} "
                "violates the constraint"
            )
        state = states[-1] if states else 0
        whole = bool(self.automaton.accepts[state])
        if request.finish_reason == "stop" and not whole:
            raise ValueError(f"the answer ends at slot {len(request)} before it is complete")
        if request.finish_reason == "length" and whole and state >= self.automaton.num_open:
            request.finish_reason = "stop"
