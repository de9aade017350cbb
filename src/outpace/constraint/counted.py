"""Schemas with upper counts that are too large for an automaton, from left to right.

The automaton of a schema without these counts holds all else, the room that there is included; a
grammar of llguidance counts beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.constraint.grammar import SPACES, Derived, Grammar
from outpace.constraint.regular import Language, Regular
from outpace.constraint.schema import LOOSE
from outpace.decoding import Request

NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
INNER = ("items", "additionalProperties")
COUNTS = ("type", "$ref", "maxLength", "maxItems")
"""Keywords that matter for upper counts, by what they have."""


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """A schema that was read once: its automaton without large counts, and its counts."""

    language: Language
    counts: Grammar

    @classmethod
    def of(
        cls, language: Language, schema: Any, tokenizer: Tokenizer, size: int, ends: frozenset[int]
    ) -> Counted:
        """Of the automaton of a schema without its large upper counts.

        Raises `ValueError` where llguidance cannot count.
        """
        source = json.dumps(counting(schema))
        return cls(
            language,
            Grammar.of("schema", source, tokenizer, size, ends, **SPACES, coerce_one_of=True),
        )

    @property
    def size(self) -> int:
        """What it counts for in a cache."""
        return self.language.size

    @property
    def shortest(self) -> int:
        """Tokens of the shortest answer: no upper count makes it longer."""
        return self.language.shortest

    def constraint(self, *, begin: int, limit: int, mask_id: int, both: bool) -> Bounded:
        """What holds one answer to it, which fills slots from `begin` to `limit`."""
        counts = self.counts
        return Bounded(
            grammar=counts,
            matcher=counts.matcher.deep_copy(),
            begin=begin,
            mask_id=mask_id,
            regular=self.language.constraint(begin=begin, limit=limit, mask_id=mask_id, both=False),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Bounded(Derived):
    """Holds one answer to an automaton and to counts, for methods that go from left to right."""

    regular: Regular

    def ban(self, row: Tensor, front: Sequence[int]) -> bool:
        """Ban what cannot follow; False where that is no matter, as no answer begins so."""
        if not Derived.ban(self, row, front):
            return False
        self.regular(row[None], [self.begin + len(front)], [*[-1] * self.begin, *front])
        return True

    def check(self, request: Request) -> None:
        """Raise `ValueError` where what was committed is no beginning of an answer."""
        Derived.check(self, request)
        self.regular.check(request)


def counting(schema: Any) -> Any:
    """What a schema says of upper counts, which accepts all that the schema accepts."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, rule in schema.items():
        if name in NAMED and isinstance(rule, dict):
            found[name] = {key: counting(part) for key, part in rule.items()}
        elif name in LISTED and isinstance(rule, list):
            found[name] = [counting(part) for part in rule]
        elif name in INNER:
            found[name] = counting(rule)
        elif name in COUNTS:
            found[name] = rule
    return found


def has_large_counts(schema: Any) -> bool:
    """Whether a part of a schema has an upper count that its automaton may leave out."""
    if isinstance(schema, list):
        return any(map(has_large_counts, schema))
    return isinstance(schema, dict) and any(
        has_large_counts(rule)
        if not isinstance(rule, int | float)
        else name in ("maxLength", "maxItems") and rule > LOOSE
        for name, rule in schema.items()
    )
