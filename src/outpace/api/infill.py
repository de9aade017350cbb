"""Where the text and the holes of a cloze stand, and what became of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outpace.api.text import Detokenizer, Text, checked_text
from outpace.constraint.cloze import Cloze, Hole, Parts, checked_cloze
from outpace.constraint.compiler import Compiler
from outpace.errors import OptionError

HOLE = re.compile(r"\{\{(\.\.)?([0-9]{1,9})(?::((?:[^{}]|\{[^{}]*\})*))?\}\}")
"""`{{8}}`, `{{..8}}`, and either with a regular expression behind a colon."""


class Filled(NamedTuple):
    """What became of a cloze.

    Attributes:
        text: all of it.
        holes: the text of each hole.
        kept: places of the tokens, from the first hole on, that are no padding.
        given: how many of them were given.
    """

    text: str
    holes: tuple[str, ...]
    kept: list[int]
    given: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parts of a cloze in slots.

    Attributes:
        text: what knows the tokenizer.
        parts: text with its tokens, and holes.
        prompt: tokens in front of the first hole.
        lead: how many of them are of the cloze.
        holes: the holes by their first slots.
        given: tokens by their slots, from the first hole on.
        ends: tokens that pad a hole.
    """

    text: Text
    parts: Sequence[tuple[str, list[int]] | Hole]
    prompt: list[int]
    lead: int
    holes: Mapping[int, Hole]
    given: Mapping[int, int]
    ends: frozenset[int]

    @classmethod
    def of(
        cls,
        cloze: Parts,
        text: Text,
        prompt: Sequence[int] | None,
        ends: frozenset[int],
    ) -> Layout:
        """Lay out a cloze behind a prompt, or behind what every text of the model begins with.

        Raises `ValueError` for what is none, and where nothing stands in front of a hole.
        """
        if text.tokenizer is None:
            message = f"cloze: {text.name} has no tokenizer, which a cloze needs"
            raise OptionError("cloze", cloze, message)
        parts = [
            part if isinstance(part, Hole) else (part, text.plain(checked_text("cloze", part)))
            for part in checked_cloze(cloze)
        ]
        front = text.plain("", begin=True) if prompt is None else list(prompt)
        first = parts[0]
        lead = [] if isinstance(first, Hole) else first[1]
        if not front + lead:
            message = "nothing stands in front of the first hole: begin with text, or give a prompt"
            raise OptionError("cloze", cloze, f"cloze: {message}")
        slot = len(front)
        holes: dict[int, Hole] = {}
        given: dict[int, int] = {}
        for part in parts:
            if isinstance(part, Hole):
                holes[slot] = part
                slot += part.size
            else:
                if holes:
                    given |= {slot + place: token for place, token in enumerate(part[1])}
                slot += len(part[1])
        return cls(
            text=text,
            parts=parts,
            prompt=front + lead,
            lead=len(lead),
            holes=holes,
            given=given,
            ends=ends,
        )

    def constraint(self, compiler: Compiler, sequential: bool, size: int, wait: bool) -> Cloze:
        """What holds an answer to it, of tokens below `size`; raises as `Cloze.of`."""
        return Cloze.of(
            compiler,
            self.holes,
            self.given,
            size=size,
            ends=self.ends,
            sequential=sequential,
            wait=wait,
        )

    @property
    def size(self) -> int:
        """Slots from the first hole on."""
        return sum(hole.size for hole in self.holes.values()) + len(self.given)

    def read(self, tokens: Sequence[int]) -> Filled:
        """What all tokens from the first hole on are."""
        detokenizer = Detokenizer(self.text)
        pieces, filled = [], []
        kept: list[int] = []
        place = -self.lead
        for part in self.parts:
            if isinstance(part, Hole):
                slots = range(place, place + part.size)
                own = [slot for slot in slots if tokens[slot] not in self.ends]
                detokenizer.push([tokens[slot] for slot in own])
                filled.append(detokenizer.take(final=True))
                pieces.append(filled[-1])
                place += part.size
            else:
                detokenizer.push(part[1])
                detokenizer.take(final=True)
                pieces.append(part[0])
                own = list(range(max(place, 0), place + len(part[1])))
                place += len(part[1])
            kept += own
        return Filled("".join(pieces), tuple(filled), kept, len(self.given) + self.lead)


def cloze_of(text: str) -> list[str | Hole]:
    """A text with `{{8}}`, `{{..8}}` or `{{8:regex}}` in it as text and holes.

    Raises `ValueError` for other text in double braces, and for text without a hole.
    """
    parts: list[str | Hole] = []
    end = 0
    for found in HOLE.finditer(text):
        upto, count, regex = found.groups()
        parts += [text[end : found.start()], hole_of(upto is not None, int(count), regex)]
        end = found.end()
    parts.append(text[end:])
    for part in parts:
        if isinstance(part, str) and "{{" in part:
            wrong = part[part.index("{{") :][:40]
            message = f"{wrong!r} is no hole: write {{{{8}}}}, {{{{..8}}}} or {{{{8:regex}}}}"
            raise OptionError("cloze", text, f"cloze: {message}")
    return checked_cloze(parts)


def hole_of(padded: bool, count: int, regex: str | None) -> Hole:
    """A hole of `count` tokens, or of up to so many."""
    return Hole(up_to=count, regex=regex) if padded else Hole(count, regex=regex)
