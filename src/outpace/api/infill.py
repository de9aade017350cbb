"""Infill templates: the layout of text and holes in slots, and the filled text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outpace.api.codec import checked_text
from outpace.api.text import Detokenizer, Text
from outpace.constraint.cloze import Cloze, Hole, Parts, checked_cloze
from outpace.constraint.compiler import Compiler
from outpace.errors import OptionError

HOLE = re.compile(r"\{\{(\.\.)?([0-9]{1,9})(?::((?:[^{}]|\{[^{}]*\})*))?\}\}")
"""`{{8}}` or `{{..8}}`, either with a regular expression after a colon."""


class Filled(NamedTuple):
    """A filled infill template.

    Attributes:
        text: Full text.
        holes: Text of each hole.
        answer_places: Places of the tokens, from the first hole on, that are not padding.
        given: Number of fixed tokens, the text before the first hole included.
    """

    text: str
    holes: tuple[str, ...]
    kept: list[int]
    given: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Slots of an infill template.

    Attributes:
        text: Tokenizer of the model.
        parts: Text with its tokens, and holes.
        prompt: Tokens before the first hole.
        lead: How many of these belong to the template.
        holes: Holes by their first slots.
        given: Fixed tokens by slot, from the first hole on.
        ends: Token ids that pad a hole.
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
        """Lay out a template after a prompt, or after the default start of a text.

        Args:
            cloze: Text and holes.
            text: Tokenizer of the model.
            prompt: Token ids of the prompt, or None.
            ends: Token ids that pad a hole.

        Raises:
            OptionError: For an invalid template, and if no text precedes the first hole.
        """
        if text.tokenizer is None:
            message = f"cloze: {text.name} has no tokenizer, which infilling needs"
            raise OptionError("cloze", cloze, message)
        parts = [
            part if isinstance(part, Hole) else (part, text.plain(checked_text("cloze", part)))
            for part in checked_cloze(cloze)
        ]
        front = text.plain("", begin=True) if prompt is None else list(prompt)
        first = parts[0]
        lead = [] if isinstance(first, Hole) else first[1]
        if not front + lead:
            message = "no text before the first hole: begin with text, or give a prompt"
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
        """Return the constraint to this template over `size` tokens; raises as `Cloze.of`."""
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
        """Number of slots from the first hole on."""
        return sum(hole.size for hole in self.holes.values()) + len(self.given)

    def read(self, tokens: Sequence[int]) -> Filled:
        """Decode all tokens from the first hole on."""
        detokenizer = Detokenizer(self.text)
        pieces, filled = [], []
        kept: list[int] = []
        place = -self.lead
        for part in self.parts:
            if isinstance(part, Hole):
                slots = range(place, place + part.size)
                places = [slot for slot in slots if tokens[slot] not in self.ends]
                detokenizer.push([tokens[slot] for slot in places])
                filled.append(detokenizer.take(final=True))
                pieces.append(filled[-1])
                place += part.size
            else:
                detokenizer.push(part[1])
                detokenizer.take(final=True)
                pieces.append(part[0])
                places = list(range(max(place, 0), place + len(part[1])))
                place += len(part[1])
            kept += places
        return Filled("".join(pieces), tuple(filled), kept, len(self.given) + self.lead)


def cloze_of(text: str) -> list[str | Hole]:
    """Parse a text with holes `{{8}}`, `{{..8}}` or `{{8:regex}}`.

    Raises:
        OptionError: For other text in double braces, and for text without a hole.
    """
    parts: list[str | Hole] = []
    end = 0
    for found in HOLE.finditer(text):
        dots, count, regex = found.groups()
        parts += [text[end : found.start()], hole_of(dots is not None, int(count), regex)]
        end = found.end()
    parts.append(text[end:])
    for part in parts:
        if isinstance(part, str) and "{{" in part:
            wrong = part[part.index("{{") :][:40]
            message = f"{wrong!r} is not a hole: write {{{{8}}}}, {{{{..8}}}} or {{{{8:regex}}}}"
            raise OptionError("cloze", text, f"cloze: {message}")
    return checked_cloze(parts)


def hole_of(padded: bool, count: int, regex: str | None) -> Hole:
    """Return a hole of `count` tokens, or of up to `count` if `padded`."""
    return Hole(up_to=count, regex=regex) if padded else Hole(count, regex=regex)
