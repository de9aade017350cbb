"""Infill templates: the layout of text and holes in slots, and the filled text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outpace.api.codec import validate_text
from outpace.api.detokenizer import Detokenizer
from outpace.api.options import RequestOptions, option_names
from outpace.api.text import TextCodec
from outpace.constraint.cloze import Hole, InfillConstraint, InfillParts, check_template
from outpace.constraint.compiler import Compiler
from outpace.decoding import CAUSAL_KINDS
from outpace.engine.pairing import Plan
from outpace.errors import ContextError, OptionError
from outpace.methods import METHODS, Method

HOLE_PATTERN = re.compile(r"\{\{(\.\.)?([0-9]{1,9})(?::((?:[^{}]|\{[^{}]*\})*))?\}\}")
"""`{{8}}` or `{{..8}}`, either with a regular expression after a colon."""


class FilledTemplate(NamedTuple):
    """A filled infill template.

    Attributes:
        text: Full text.
        holes: Text of each hole.
        answer_places: Places of the tokens, from the first hole on, that are not padding.
        given: Number of fixed tokens, the text before the first hole included.
    """

    text: str
    holes: tuple[str, ...]
    answer_places: list[int]
    given: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillLayout:
    """Slots of an infill template.

    Attributes:
        text: Tokenizer of the model.
        parts: Text with its tokens, and holes.
        prompt: Tokens before the first hole.
        lead: How many of these belong to the template.
        holes: Holes by their first slots.
        given: Fixed tokens by slot, from the first hole on.
        ends: Token ids that pad a hole.
        is_suffix: Whether the answer is the text of its only hole, and the text after it a suffix.
    """

    text: TextCodec
    parts: Sequence[tuple[str, list[int]] | Hole]
    prompt: list[int]
    lead: int
    holes: Mapping[int, Hole]
    given: Mapping[int, int]
    ends: frozenset[int]
    is_suffix: bool = False

    @classmethod
    def of(
        cls, cloze: InfillParts, text: TextCodec, prompt: Sequence[int], ends: frozenset[int]
    ) -> InfillLayout:
        """Lay out a template after a prompt, or after the default start of a sequence.

        Args:
            cloze: Text and holes.
            text: Tokenizer of the model.
            prompt: Token ids of the prompt; empty if there is none.
            ends: Token ids that pad a hole.

        Raises:
            OptionError: For an invalid template, and if no text precedes the first hole.
        """
        if text.tokenizer is None:
            raise OptionError(
                "cloze", cloze, f"{text.name} has no tokenizer, which infilling needs"
            )
        parts = [
            part
            if isinstance(part, Hole)
            else (part, text.encode_plain(validate_text("cloze", part)))
            for part in check_template(cloze)
        ]
        front = list(prompt) or text.encode_plain("", begin=True)
        first = parts[0]
        lead = [] if isinstance(first, Hole) else first[1]
        if not front + lead:
            raise OptionError(
                "cloze", cloze, "no text before the first hole: begin with text, or give a prompt"
            )
        slot = len(front)
        holes: dict[int, Hole] = {}
        given: dict[int, int] = {}
        for part in parts:
            if isinstance(part, Hole):
                holes[slot] = part
                slot += part.size
            else:
                # Text before the first hole is part of the prompt.
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

    @classmethod
    def before_suffix(
        cls,
        text: TextCodec,
        prompt: list[int],
        suffix: Sequence[int],
        plan: Plan,
        ends: frozenset[int],
    ) -> InfillLayout:
        """Lay out an answer of up to `plan.max_tokens` tokens between a prompt and a suffix.

        Raises:
            OptionError: If no text precedes the answer.
            ContextError: If answer and suffix do not fit.
        """
        if not prompt:
            raise OptionError("prompt", prompt, "must not be empty: give at least one token")
        size, begin = plan.max_tokens, len(prompt)
        if size > plan.room:
            raise ContextError(
                "max_tokens",
                size,
                f"must be at most {max(plan.room, 0)} between {begin} tokens and {len(suffix)}",
            )
        hole = Hole(up_to=size)
        return cls(
            text=text,
            parts=[hole],
            prompt=prompt,
            lead=0,
            holes={begin: hole},
            given=dict(enumerate(suffix, begin + size)),
            ends=ends,
            is_suffix=True,
        )

    def build_constraint(
        self, compiler: Compiler, sequential: bool, size: int, wait: bool
    ) -> InfillConstraint:
        """Return the constraint to this template over `size` tokens, as `from_holes`."""
        return InfillConstraint.from_holes(
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

    def decode_answer(self, tokens: Sequence[int]) -> FilledTemplate:
        """Decode all tokens from the first hole on."""
        detokenizer = Detokenizer(self.text)
        pieces, filled = [], []
        kept: list[int] = []
        place = -self.lead
        for part in self.parts:
            if isinstance(part, Hole):
                slots = range(place, place + part.size)
                places = [slot for slot in slots if tokens[slot] not in self.ends]
                detokenizer.push_tokens([tokens[slot] for slot in places])
                filled.append(detokenizer.take_text(final=True))
                pieces.append(filled[-1])
                place += part.size
            else:
                detokenizer.push_tokens(part[1])
                detokenizer.take_text(final=True)
                pieces.append(part[0])
                places = list(range(max(place, 0), place + len(part[1])))
                place += len(part[1])
            kept += places
        return FilledTemplate("".join(pieces), tuple(filled), kept, len(self.given) + self.lead)


def check_can_infill(method: Method) -> None:
    """Raise `OptionError` if a method cannot condition on text after a hole."""
    if not method.sees_ahead:
        able = (kind.__name__ for kind in METHODS.values() if kind.target_kinds != CAUSAL_KINDS)
        raise OptionError(
            "method",
            method,
            f"{method!r} cannot condition on text after a hole, so it cannot infill; use one of "
            f"these, unverified: {', '.join(able)}",
        )


def check_suffix(options: RequestOptions, method: Method, text: TextCodec) -> None:
    """Raise `OptionError` for a suffix, or an option beside it, that the model does not support."""
    if text.middle_tokens is not None:
        return
    if not method.sees_ahead:
        raise OptionError(
            "suffix",
            options.suffix,
            f"{text.name} has no tokens to fill in the middle, and {method!r} cannot condition on "
            "text after the answer; omit suffix",
        )
    names = ["stop_ids", "ignore_eos", "min_tokens", *option_names("rule")]
    options.check_absent(names, "suffix")


def parse_template(text: str) -> list[str | Hole]:
    """Parse a string with holes `{{8}}`, `{{..8}}` or `{{8:regex}}`.

    Raises:
        OptionError: For other text in double braces, and for text without a hole.
    """
    parts: list[str | Hole] = []
    end = 0
    for found in HOLE_PATTERN.finditer(text):
        dots, count, regex = found.groups()
        size = {"tokens" if dots is None else "up_to": int(count)}
        parts += [text[end : found.start()], Hole(**size, regex=regex)]
        end = found.end()
    parts.append(text[end:])
    for part in parts:
        if isinstance(part, str) and "{{" in part:
            wrong = part[part.index("{{") :][:40]
            raise OptionError(
                "cloze",
                text,
                f"{wrong!r} is no hole: write {{{{8}}}}, {{{{..8}}}} or {{{{8:regex}}}}",
            )
    return check_template(parts)
