"""Answers that an automaton accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.constraint.automaton import HOLE, Automaton
from outpace.constraint.lattice import completed
from outpace.constraint.reach import Reach, Sets
from outpace.decoding import Request
from outpace.decoding.processor import NEVER
from outpace.decoding.sampling import Sample


class Language:
    """What an automaton accepts, with what was found out about its states."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.sets = Sets(automaton)
        self.free = torch.zeros(len(automaton.classes), dtype=torch.bool)

    @property
    def size(self) -> int:
        """What it counts for in a cache: entries of its tables."""
        return self.automaton.table.size + 8 * len(self.automaton.bundles)

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
        reach = self.reach(answer)
        broken = reach.first < self.hole(answer)
        banned = [
            # Behind what is part of no answer nothing is taken, nor is it behind the limit.
            self.language.free
            if slot >= self.limit or (broken and slot - self.begin > reach.first)
            else reach.banned(slot - self.begin)
            for slot in slots
        ]
        mask = torch.stack(banned).to(logits.device)
        logits[:, : mask.shape[1]].masked_fill_(mask, NEVER)

    def forced(self, ids: Sequence[int]) -> list[int]:
        """Tokens that alone can stand behind a text, one behind the other, without an end."""
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
        """What can still become of an answer."""
        first = self.hole(answer)
        behind = answer[first:]
        kinds = self.automaton.classes[list(behind)].tolist() if behind else ()
        holes = [
            HOLE if token == self.mask_id else kind
            for token, kind in zip(behind, kinds, strict=True)
        ]
        return Reach(
            self.language.sets,
            [0, *self.walk(answer[:first])],
            holes,
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
        places = sorted(p for p in rows if p >= reach.first and reach.kind(p) == HOLE)
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
        state, end = reach.states[-1], places[-1] + 1
        for place in range(reach.first, end):
            kind = chosen.get(place, reach.kind(place))
            state = -1 if kind == HOLE else int(self.automaton.table[state, kind])
            if state < 0:
                return False
        return bool(reach.tail(end).flags[state])

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
