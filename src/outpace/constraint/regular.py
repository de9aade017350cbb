"""Constraints by an automaton over tokens, for any order of decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.constraint.automaton import HOLE_CLASS, TokenAutomaton
from outpace.constraint.lattice import HoleSegment, complete_segments
from outpace.constraint.reach import ReachableStates, StateMoves, StateSets
from outpace.decoding import Request
from outpace.decoding.joint import JointRows
from outpace.decoding.processor import BANNED_LOGIT


class TokenLanguage:
    """Strings that an automaton accepts, with cached sets of its states."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.sets = StateSets(automaton)
        self.no_ban = torch.zeros(len(automaton.classes), dtype=torch.bool)

    @property
    def cache_entries(self) -> int:
        """Size in the cache, in table entries."""
        return self.automaton.table.size + 8 * len(self.automaton.pair_bundles)

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the shortest answer."""
        return self.automaton.min_tokens

    def build_constraint(
        self,
        *,
        begin: int,
        limit: int,
        mask_id: int,
        both: bool,
        thoughts: int | None = None,
    ) -> RegularConstraint:
        """Create the constraint of one answer in slots `begin` to `limit`.

        If `thoughts` is not None, the text that ends thoughts begins after this many tokens, or
        earlier.
        """
        if 0 <= mask_id < len(self.no_ban) and self.automaton.classes[mask_id]:
            mask_id = -1  # a token that answers may contain cannot mark holes
        deadline = None if thoughts is None else self.automaton.thought_deadline(thoughts)
        return RegularConstraint(
            language=self,
            begin=begin,
            limit=limit,
            mask_id=mask_id,
            both=both,
            deadline=deadline,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RegularConstraint:
    """Constrain one answer to an automaton exactly, for any order of filling.

    The answer begins at slot `begin` and must be complete before slot `limit`. In each row, tokens
    are banned that no answer has there, given all tokens so far, or without `both` only those
    before the row. Holes that are filled together receive the most probable tokens that fit. Above
    temperature 0 they are an exact sample of the product of the predictions, given that the tokens
    fit.
    """

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
        """Automaton that accepts the answers."""
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
        """Return the first place that is not filled."""
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
        """Return the possible states of an answer, cached for the last one."""
        first = self.first_hole(answer)
        rest = answer[first:]
        if rest.count(self.mask_id) == len(rest):
            answer = answer[:first]
        if self.last_reach is None or self.last_reach[0] != answer:
            self.last_reach = answer, self.build_reachable(answer, first)
        return self.last_reach[1]

    def build_reachable(self, answer: Sequence[int], first: int) -> ReachableStates:
        """Return the possible states of an answer whose first hole is at place `first`."""
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
        """Change tokens so that they fit together; keep segments that already fit.

        A sample that is kept if it fits, and otherwise replaced by an independent one given that it
        fits, has the distribution of the latter. The same holds segment by segment.
        """
        chosen = tokens.tolist()
        complete_segments(
            [each for fit in asked for each in fit.constraint.broken_segments(fit, chosen)],
            logits,
            tokens,
        )

    def broken_segments(self, fit: JointRows, tokens: Sequence[int]) -> Iterator[HoleSegment]:
        """Yield the segments of holes in which the `tokens` of all rows fit no answer.

        A single state is possible before each segment, so that segments are independent.
        """
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
