"""Constraints by an automaton over tokens, for any order of decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.constraint.automaton import HOLE, Automaton
from outpace.constraint.lattice import Stretch, complete
from outpace.constraint.reach import Moves, Reach, Sets
from outpace.decoding import Request
from outpace.decoding.joint import Fit
from outpace.decoding.processor import NEVER


class Language:
    """Texts that an automaton accepts, with cached sets of its states."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.sets = Sets(automaton)
        self.free = torch.zeros(len(automaton.classes), dtype=torch.bool)

    @property
    def size(self) -> int:
        """Size in the cache, in table entries."""
        return self.automaton.table.size + 8 * len(self.automaton.bundles)

    @property
    def shortest(self) -> int:
        """Number of tokens of the shortest answer."""
        return self.automaton.shortest

    def constraint(self, *, begin: int, limit: int, mask_id: int, both: bool) -> Regular:
        """Create the constraint of one answer in slots `begin` to `limit`."""
        if 0 <= mask_id < len(self.free) and self.automaton.classes[mask_id]:
            mask_id = -1  # a token that answers may contain cannot mark holes
        return Regular(language=self, begin=begin, limit=limit, mask_id=mask_id, both=both)


@dataclass(slots=True, kw_only=True, eq=False)
class Regular:
    """Constrain one answer to an automaton exactly, for any order of filling.

    The answer begins at slot `begin` and must be complete before slot `limit`. In each row, tokens
    are banned that no answer has there, given all tokens so far, or without `both` only those
    before the row. Holes that are filled together receive the most probable tokens that fit. Above
    temperature 0 they are an exact sample of the product of the predictions, given that the tokens
    fit.
    """

    language: Language
    begin: int
    limit: int
    mask_id: int
    both: bool
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """Tokens of the last walked answer, and the state after each."""
    known: tuple[Sequence[int], Reach] | None = None
    """The last answer, without trailing holes, and its states; a ban and its read use the same."""

    @property
    def automaton(self) -> Automaton:
        """Automaton that accepts the answers."""
        return self.language.automaton

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`, each row according to the tokens of `text`."""
        answer = text[self.begin : self.limit]
        reach = self.reach(answer)
        broken = reach.first < self.hole(answer)
        banned = [
            # Nothing is constrained after an invalid token or the limit.
            self.language.free
            if slot >= self.limit or (broken and slot - self.begin > reach.first)
            else reach.banned(slot - self.begin)
            for slot in slots
        ]
        mask = torch.stack(banned).to(logits.device)
        logits[:, : mask.shape[1]].masked_fill_(mask, NEVER)

    def forced(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow a text, without an end-of-sequence."""
        reach, found = self.reach(ids[self.begin :]), list[int]()
        sets, state = reach.sets, reach.states[-1]
        for left in range(self.limit - len(ids) - 1, 0, -1):
            token = sets.moves(sets.single(state), sets.within(left)).only
            if token is None:
                break
            state = int(self.automaton.table[state, self.automaton.classes[token]])
            if state == self.automaton.end:
                break
            found.append(token)
        return found

    def hole(self, answer: Sequence[int]) -> int:
        """Return the first place that is not filled."""
        return answer.index(self.mask_id) if self.mask_id in answer else len(answer)

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Return the state after each token that is part of an answer; reuse the last walk."""
        same = len(self.tokens)
        if tokens[:same] != self.tokens:
            pairs = enumerate(zip(tokens, self.tokens, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(same, len(tokens)))
        if same <= len(self.states):
            del self.states[same:]
            last = self.states[-1] if self.states else 0
            self.states += self.automaton.walk(tokens[same:], last)
        self.tokens = list(tokens)
        return self.states

    def reach(self, answer: Sequence[int]) -> Reach:
        """Return the possible states of an answer, cached for the last one."""
        first = self.hole(answer)
        rest = answer[first:]
        if rest.count(self.mask_id) == len(rest):
            answer = answer[:first]
        if self.known is None or self.known[0] != answer:
            self.known = answer, self.reached(answer, first)
        return self.known[1]

    def reached(self, answer: Sequence[int], first: int) -> Reach:
        """Return the possible states of an answer whose first hole is at place `first`."""
        rest = answer[first:]
        classes = self.automaton.classes  # the mask may be outside the vocabulary
        holes = [HOLE if token == self.mask_id else int(classes[token]) for token in rest]
        return Reach(
            self.language.sets,
            [0, *self.walk(answer[:first])],
            holes,
            room=self.limit - self.begin,
            both=self.both,
        )

    @staticmethod
    def together(asked: Sequence[Fit], logits: Tensor, tokens: Tensor) -> None:
        """Change tokens so that they fit together; keep segments that already fit.

        A sample that is kept if it fits, and otherwise replaced by an independent one given that it
        fits, has the distribution of the latter. The same holds segment by segment.
        """
        chosen = tokens.tolist()
        complete(
            [each for fit in asked for each in fit.constraint.broken(fit, chosen)], logits, tokens
        )

    def broken(self, fit: Fit, tokens: Sequence[int]) -> Iterator[Stretch]:
        """Yield the segments of holes in which the `tokens` of all rows fit no answer.

        A single state is possible before each segment, so that segments are independent.
        """
        assert fit.read.joint is not None
        reach = self.reach(fit.read.joint.text[self.begin : self.limit])
        slots = zip(fit.slots, fit.rows, strict=True)
        rows = {slot - self.begin: row for slot, row in slots if slot < self.limit}
        rows = {p: rows[p] for p in sorted(rows) if p >= reach.first and reach.kind(p) == HOLE}
        if not rows:
            return
        places = range(reach.first, max(rows) + 1)
        steps = reach.steps(places.stop)
        for begin, end in self.stretches(reach, steps, rows, tokens):
            own = places[begin:end]
            holes = [place for place in own if reach.kind(place) == HOLE]
            if any(place in rows for place in holes):
                yield Stretch(
                    steps=steps[begin:end],
                    holes=[place in holes for place in own],
                    rows=[rows.get(place, -1) for place in holes],
                    slots=[self.begin + place for place in holes],
                    read=fit.read,
                )

    def stretches(
        self,
        reach: Reach,
        steps: Sequence[Moves],
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
                automaton.classes[tokens[rows[place]]] if place in rows else reach.kind(place)
            )
            state = (
                -1 if state < 0 or token_class == HOLE else int(automaton.table[state, token_class])
            )
        if state < 0 or not reach.tail(reach.first + len(steps)).flags[state]:
            yield begin, len(steps)

    def check(self, request: Request) -> None:
        """Raise `ValueError` if the committed tokens do not begin an answer."""
        tokens = request.tokens
        states = self.walk(tokens)
        if len(states) < len(tokens):
            raise ValueError(
                f"token {tokens[len(states)]} at slot {self.begin + len(states)} "
                "violates the constraint"
            )
        whole = bool(self.automaton.accepts[states[-1] if states else 0])
        if request.finish_reason == "stop" and not whole:
            raise ValueError(f"the answer ends at slot {len(request)} before it is complete")
        if request.finish_reason == "length" and whole:
            request.finish_reason = "stop"
