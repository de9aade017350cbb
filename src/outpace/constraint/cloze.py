"""Infill templates: text with holes, and the constraint on each hole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.constraint.automaton import TokenAutomaton
from outpace.constraint.compiler import Compiler, ConstraintRule, NotCompiledError, RuleKey
from outpace.constraint.regular import RegularConstraint, TokenLanguage
from outpace.decoding import Request
from outpace.decoding.processor import BANNED_LOGIT
from outpace.decoding.sampling import JointRows
from outpace.errors import OptionError
from outpace.field_types import PositiveInt, check_value

ANY_TEXT = r"[\s\S]*"


@dataclass(frozen=True, slots=True)
class Hole:
    """A gap in a text that is filled by exactly `tokens` tokens, or by `up_to` tokens.

    Raises:
        OptionError: if a value is invalid.
    """

    tokens: int | None = None
    """Exact number of tokens."""
    up_to: int | None = None
    """Maximum number of tokens; exactly one of both is given."""
    regex: str | None = None
    """Regular expression that the text of the hole must match as a whole."""

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.up_to is None):
            raise OptionError(
                "hole.tokens", self.tokens, f"give exactly one of tokens and up_to, got {self}"
            )
        for name in ("tokens", "up_to"):
            check_value(f"hole.{name}", getattr(self, name), PositiveInt | None)
        if self.regex is not None and not isinstance(self.regex, str):
            raise OptionError("hole.regex", self.regex, "must be a string")

    @property
    def size(self) -> int:
        return int(self.tokens or self.up_to or 0)

    @property
    def rule(self) -> ConstraintRule:
        """The constraint on its text, for a compiler."""
        kind = "padded hole" if self.tokens is None else "hole"
        return kind, ANY_TEXT if self.regex is None else self.regex

    def compile_language(
        self, compiler: Compiler, size: int, ends: frozenset[int]
    ) -> TokenLanguage:
        read = compiler.compile_rule(RuleKey(self.rule, False, size, ends), self.size)
        assert isinstance(read, TokenLanguage)
        if not read.automaton.can_finish(self.size)[0]:
            raise ValueError(
                f"it has {self.size} tokens, but {describe_lengths(read.automaton, self.size)}"
            )
        return read


InfillParts = Sequence[str | Hole]
"""Text and holes of an infill template as given."""


def describe_lengths(automaton: TokenAutomaton, room: int) -> str:
    if automaton.min_tokens > room:
        return f"the shortest text of its regex takes {automaton.min_tokens}"
    longest = max(count for count in range(room) if automaton.can_finish(count)[0])
    return f"its regex has texts of {longest} tokens and none of {room}"


def check_template(cloze: Any) -> list[str | Hole]:
    """Return the non-empty parts of a template."""
    if isinstance(cloze, str | bytes) or not isinstance(cloze, Sequence):
        raise OptionError("cloze", cloze, "must be a list of text and holes")
    for number, part in enumerate(cloze):
        if not isinstance(part, str | Hole):
            param = f"cloze[{number}]"
            raise OptionError(param, part, "must be text or a hole")
    if not any(isinstance(part, Hole) for part in cloze):
        raise OptionError("cloze", cloze, "must contain a hole, such as Hole(8) or {{8}}")
    return [part for part in cloze if part != ""]


@dataclass(frozen=True, slots=True, eq=False)
class InfillConstraint:
    """Constrain an answer to fixed tokens and to the constraints of the holes between them."""

    # Each constraint depends only on the tokens in its hole; text outside cannot violate it.

    holes: Sequence[RegularConstraint]
    fixed_tokens: Mapping[int, int]

    @classmethod
    def from_holes(
        cls,
        compiler: Compiler,
        holes: Mapping[int, Hole],
        fixed_tokens: Mapping[int, int],
        *,
        size: int,
        ends: frozenset[int],
        sequential: bool,
        wait: bool = True,
    ) -> InfillConstraint:
        """Create the constraint of holes by their first slots, and fixed tokens by their slots."""
        mask_id = -1 if compiler.mask_id is None else compiler.mask_id
        if not wait and not all(
            compiler.is_compiled(RuleKey(hole.rule, False, size, ends)) for hole in holes.values()
        ):
            raise NotCompiledError
        constraints = []
        for number, (begin, hole) in enumerate(holes.items()):
            try:
                language = hole.compile_language(compiler, size, ends)
            except ValueError as error:
                param = f"holes[{number}]"
                raise OptionError(param, hole, str(error)) from error
            constraints.append(
                language.build_constraint(
                    begin=begin, limit=begin + hole.size, mask_id=mask_id, both=not sequential
                )
            )
        return cls(constraints, fixed_tokens)

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        for hole in self.holes:
            if rows := hole_rows(hole, slots):
                own = logits[rows]
                hole(own, [slots[row] for row in rows], text)
                logits[rows] = own
        for row, slot in enumerate(slots):
            if (token := self.fixed_tokens.get(slot)) is not None:
                logits[row] = BANNED_LOGIT
                logits[row, token] = 0

    @staticmethod
    def choose_jointly(asked: Sequence[JointRows], logits: Tensor, tokens: Tensor) -> None:
        holes = [
            JointRows(hole, [rows[place] for place in own], [slots[place] for place in own], read)
            for cloze, rows, slots, read in asked
            for hole in cloze.holes
            if len(own := hole_rows(hole, slots)) > 1
        ]
        RegularConstraint.choose_jointly(holes, logits, tokens)

    def forced_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow, up to the end of the hole in which the text ends."""
        inside = (hole for hole in self.holes if hole.begin <= len(ids) < hole.limit)
        return next((hole.forced_tokens(ids) for hole in inside), [])

    def check(self, request: Request) -> None:
        """Raise `ValueError` if committed tokens differ from the text or do not fit a hole."""
        end = len(request)
        wrong = [s for s, token in self.fixed_tokens.items() if s < end and request.ids[s] != token]
        for hole in self.holes:
            tokens = request.ids[hole.begin : hole.limit]
            states = hole.walk_answer(tokens)
            whole = len(tokens) < hole.limit - hole.begin or (
                len(states) == len(tokens) and hole.automaton.accepts[states[-1]]
            )
            if len(states) < len(tokens) or not whole:
                wrong.append(hole.begin + min(len(states), len(tokens) - 1))
        if wrong:
            slot = min(wrong)
            raise ValueError(
                f"token {request.ids[slot]} at slot {slot} violates the infill template"
            )
        if request.finish_reason == "length":
            request.finish_reason = "stop"


def hole_rows(hole: RegularConstraint, slots: Sequence[int]) -> list[int]:
    return [row for row, slot in enumerate(slots) if hole.begin <= slot < hole.limit]
