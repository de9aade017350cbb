"""Answers that an automaton accepts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.constraint.automaton import Automaton
from outpace.constraint.dfa import Flags
from outpace.constraint.lattice import completed
from outpace.constraint.reach import HOLE, Reach
from outpace.decoding import Request
from outpace.decoding.processor import NEVER
from outpace.decoding.sampling import Sample

MEMORY = 32 * 2**20
"""Bytes of masks that are kept for each automaton."""


class Masks:
    """Which tokens are banned in a state where so many places are left; the last ones are kept."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.known: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self.most = max(MEMORY // len(automaton.classes), 16)
        self.far = automaton.far

    def banned(self, state: int, left: int) -> Tensor:
        """`bool[V]`; `left` counts the places behind this one."""
        key = state, min(left, self.far)
        found = self.known.pop(key, None)
        if found is None:
            targets = self.automaton.table[state]
            allowed = (targets >= 0) & self.automaton.finishes(left)[targets]
            found = self.of(allowed)
            if len(self.known) >= self.most:
                self.known.popitem(last=False)
        self.known[key] = found
        return found

    def of(self, allowed: Flags) -> Tensor:
        """`bool[V]` where classes `allowed [C]` are not banned."""
        return torch.from_numpy(~allowed[self.automaton.classes])


class Language:
    """What an automaton accepts, with the masks of its states."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.masks = Masks(automaton)

    @property
    def size(self) -> int:
        """What it counts for in a cache: entries of its tables."""
        return self.automaton.table.size + 6 * len(self.automaton.froms)

    def constraint(self, *, begin: int, limit: int, mask_id: int, both: bool) -> Regular:
        """What holds one answer to it, which fills slots from `begin` to `limit`."""
        return Regular(language=self, begin=begin, limit=limit, mask_id=mask_id, both=both)


@dataclass(slots=True, kw_only=True, eq=False)
class Regular:
    """Holds one answer to an automaton: exactly, whatever its method fills first.

    The answer begins at slot `begin` and has to be whole before slot `limit`. In a row, tokens
    are banned that no answer has there, given all that is known, or where `both` is false what is
    known in front. Holes that are filled together get the most probable tokens of all that fit,
    or above temperature 0 an exact draw of the product of what is predicted for each, given that
    they fit.
    """

    language: Language
    begin: int
    limit: int
    mask_id: int
    both: bool
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """Tokens of the answer that were walked last, and the states behind them."""

    @property
    def automaton(self) -> Automaton:
        """What accepts its answers."""
        return self.language.automaton

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`, each row by what is known of `text`."""
        answer = text[self.begin : self.limit]
        first, reach = self.hole(answer), None
        states = [0, *self.walk(answer[:first])]
        for row, slot in zip(logits, slots, strict=True):
            place = slot - self.begin
            if slot >= self.limit:
                continue
            if place < len(states) and not (self.both and first < len(answer)):
                banned = self.language.masks.banned(states[place], self.limit - slot - 1)
            elif len(states) <= first:
                continue  # behind what is part of no answer: nothing is taken from there
            else:
                reach = reach or self.reach(answer)
                banned = self.language.masks.of(reach.allowed(place))
            row[: len(banned)].masked_fill_(banned.to(row.device), NEVER)

    def hole(self, answer: Sequence[int]) -> int:
        """The first place that is not filled."""
        return answer.index(self.mask_id) if self.mask_id in answer else len(answer)

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The states behind tokens, as many as are part of an answer; the last walk is kept."""
        known = len(self.tokens)
        if tokens[:known] != self.tokens:
            pairs = enumerate(zip(tokens, self.tokens, strict=False))
            known = next((n for n, (a, b) in pairs if a != b), min(known, len(tokens)))
        if known <= len(self.states):
            del self.states[known:]
            last = self.states[-1] if self.states else 0
            self.states += self.automaton.walk(tokens[known:], last)
        self.tokens = list(tokens)
        return self.states

    def reach(self, answer: Sequence[int]) -> Reach:
        """What can still become of an answer whose tokens in front of the first hole are right."""
        first = self.hole(answer)
        states = self.walk(answer[:first])
        kinds = self.automaton.classes[list(answer)]
        holes = [
            HOLE if token == self.mask_id else kind
            for token, kind in zip(answer, kinds.tolist(), strict=True)
        ]
        return Reach(
            self.automaton,
            holes,
            first=first,
            state=states[-1] if states else 0,
            room=self.limit - self.begin,
            both=self.both,
        )

    def together(
        self, logits: Tensor, tokens: Tensor, slots: Sequence[int], read: Sample
    ) -> Tensor:
        """Tokens `[r]` that fit together: those chosen apart if they do, as they mostly do.

        A draw that is kept if it fits, and else replaced by an independent one given that it
        fits, has the law of the latter.
        """
        assert read.joint is not None
        if len(slots) < 2:
            return tokens
        reach = self.reach(read.joint.text[self.begin : self.limit])
        rows = {slot - self.begin: row for row, slot in enumerate(slots) if slot < self.limit}
        places = sorted(place for place in rows if reach.kind(place) == HOLE)
        if not places:
            return tokens
        inside = [rows[place] for place in places]
        if self.fits(reach, places, tokens[inside].tolist()):
            return tokens
        result = tokens.clone()
        result[inside] = completed(reach, places, logits[inside], self.begin, read)
        return result

    def fits(self, reach: Reach, places: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether tokens at some places are part of an answer, as far as all before is known."""
        chosen = dict(zip(places, self.automaton.classes[list(tokens)].tolist(), strict=True))
        state, end = int(reach.head(reach.first).argmax()), places[-1] + 1
        for place in range(reach.first, end):
            kind = chosen.get(place, reach.kind(place))
            state = -1 if kind == HOLE else int(self.automaton.table[state, kind])
            if state < 0:
                return False
        return bool(reach.tail(end)[state])

    def check(self, request: Request) -> None:
        """Raise `ValueError` where what was committed is no beginning of an answer."""
        tokens = request.tokens
        states = self.walk(tokens)
        if len(states) < len(tokens):
            raise ValueError(
                f"token {tokens[len(states)]} at slot {self.begin + len(states)} "
                "breaks the constraint"
            )
        whole = bool(self.automaton.accepts[states[-1] if states else 0])
        if request.finish_reason == "stop" and not whole:
            raise ValueError(f"the answer ends at slot {len(request)} before it is whole")
        if request.finish_reason == "length" and whole:
            request.finish_reason = "stop"
