"""Text with holes: what may stand in each hole, and nothing else anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

from torch import Tensor

from outpace.constraint.automaton import Automaton
from outpace.constraint.compiler import Compiler, Rule, Unread
from outpace.constraint.regular import Language, Regular
from outpace.decoding import Request
from outpace.decoding.joint import Fit
from outpace.decoding.processor import NEVER
from outpace.decoding.sampling_params import is_whole
from outpace.errors import OptionError

ANYTHING = r"[\s\S]*"


@dataclass(frozen=True, slots=True)
class Hole:
    """A place in a text that is filled by exactly `tokens` tokens, or by `up_to` so many.

    `regex` is what its text must be as a whole. Raises `ValueError` for values that mean nothing.
    """

    tokens: int | None = None
    up_to: int | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.up_to is None):
            message = f"hole.tokens: a hole has either tokens or up_to, and one of them, not {self}"
            raise OptionError("hole.tokens", self.tokens, message)
        for name in ("tokens", "up_to"):
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and value >= 1):
                param = f"hole.{name}"
                message = f"{param} must be a whole number from 1 on, not {value!r}"
                raise OptionError(param, value, message)
        if self.regex is not None and not isinstance(self.regex, str):
            message = f"hole.regex must be a string, not {self.regex!r}"
            raise OptionError("hole.regex", self.regex, message)

    @property
    def size(self) -> int:
        """Slots that it takes."""
        return int(self.tokens or self.up_to or 0)

    @property
    def rule(self) -> Rule:
        """What its text must be, for a compiler."""
        kind = "padded hole" if self.tokens is None else "hole"
        return kind, ANYTHING if self.regex is None else self.regex

    def language(self, compiler: Compiler, size: int, ends: frozenset[int]) -> Language:
        """What may stand in it, of tokens below `size`; `ends` pad what is shorter.

        Raises `ValueError` where nothing does.
        """
        read = compiler.read(self.rule, False, size, ends, self.size)
        assert isinstance(read, Language)
        if not read.automaton.finishes(self.size)[0]:
            raise ValueError(f"it has {self.size} tokens, but {lengths(read.automaton, self.size)}")
        return read


Parts = Sequence[str | Hole]
"""A cloze as it is given: text with holes in it."""


def lengths(automaton: Automaton, room: int) -> str:
    """In words, how many tokens the texts have of which none takes as many as `room`."""
    if automaton.shortest > room:
        return f"the shortest text of its regex takes {automaton.shortest}"
    longest = max(count for count in range(room) if automaton.finishes(count)[0])
    return f"its regex has texts of {longest} tokens and none of {room}"


def checked_cloze(cloze: Any) -> list[str | Hole]:
    """Text and holes; `ValueError` for what is neither, and where there is no hole."""
    if isinstance(cloze, str | bytes) or not isinstance(cloze, Sequence):
        message = f"cloze: a cloze is a list of text and holes, not {brief(cloze)}"
        raise OptionError("cloze", cloze, message)
    for number, part in enumerate(cloze):
        if not isinstance(part, str | Hole):
            param = f"cloze[{number}]"
            message = f"{param}: a cloze is a list of text and holes; {brief(part)} is neither"
            raise OptionError(param, part, message)
    if not any(isinstance(part, Hole) for part in cloze):
        message = "cloze: a cloze without a hole has nothing to fill: give Hole(8) or {{8}}"
        raise OptionError("cloze", cloze, message)
    return [part for part in cloze if part != ""]


@dataclass(frozen=True, slots=True, eq=False)
class Cloze:
    """Holds an answer to tokens that are given and to what may stand in the holes between them.

    Each of `holes` is bound by what is filled in itself: no text outside can break it.
    """

    holes: Sequence[Regular]
    given: Mapping[int, int]

    @classmethod
    def of(
        cls,
        compiler: Compiler,
        holes: Mapping[int, Hole],
        given: Mapping[int, int],
        *,
        size: int,
        ends: frozenset[int],
        sequential: bool,
        wait: bool = True,
    ) -> Cloze:
        """Of `holes` by their first slots, and tokens `given` by their slots.

        Raises `ValueError` that names the hole where nothing can fill it, and unless it shall
        `wait`, `Unread` where a regular expression was not read yet.
        """
        mask_id = -1 if compiler.mask_id is None else compiler.mask_id
        if not wait and not all(
            compiler.knows(hole.rule, False, size, ends) for hole in holes.values()
        ):
            raise Unread
        made = []
        for number, (begin, hole) in enumerate(holes.items()):
            try:
                language = hole.language(compiler, size, ends)
            except ValueError as error:
                param = f"holes[{number}]"
                raise OptionError(param, hole, f"{param}: {error}") from error
            made.append(
                language.constraint(
                    begin=begin, limit=begin + hole.size, mask_id=mask_id, both=not sequential
                )
            )
        return cls(made, given)

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`: all but one where it is given."""
        for hole in self.holes:
            if rows := rows_of(hole, slots):
                own = logits[rows]
                hole(own, [slots[row] for row in rows], text)
                logits[rows] = own
        for row, slot in enumerate(slots):
            if (token := self.given.get(slot)) is not None:
                logits[row] = NEVER
                logits[row, token] = 0

    @staticmethod
    def together(asked: Sequence[Fit], logits: Tensor, tokens: Tensor) -> None:
        """Change tokens so that they fit together, hole by hole."""
        holes = [
            Fit(hole, [rows[place] for place in own], [slots[place] for place in own], read)
            for cloze, rows, slots, read in asked
            for hole in cloze.holes
            if len(own := rows_of(hole, slots)) > 1
        ]
        Regular.together(holes, logits, tokens)

    def forced(self, ids: Sequence[int]) -> list[int]:
        """Tokens that must come next, as far as the end of the hole that a text ends in."""
        inside = (hole for hole in self.holes if hole.begin <= len(ids) < hole.limit)
        return next((hole.forced(ids) for hole in inside), [])

    def check(self, request: Request) -> None:
        """Raise `ValueError` where what was committed is not the text, or does not fit a hole."""
        end = len(request)
        wrong = [s for s, token in self.given.items() if s < end and request.ids[s] != token]
        for hole in self.holes:
            tokens = request.ids[hole.begin : hole.limit]
            states = hole.walk(tokens)
            whole = len(tokens) < hole.limit - hole.begin or (
                len(states) == len(tokens) and hole.automaton.accepts[states[-1]]
            )
            if len(states) < len(tokens) or not whole:
                wrong.append(hole.begin + min(len(states), len(tokens) - 1))
        if wrong:
            slot = min(wrong)
            raise ValueError(f"token {request.ids[slot]} at slot {slot} is no part of the cloze")
        if request.finish_reason == "length":
            request.finish_reason = "stop"


def rows_of(hole: Regular, slots: Sequence[int]) -> list[int]:
    """Rows of the slots that lie in a hole."""
    return [row for row, slot in enumerate(slots) if hole.begin <= slot < hole.limit]
