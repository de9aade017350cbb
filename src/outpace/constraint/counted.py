"""Schemas whose upper counts are too large for an automaton, for left-to-right decoding.

The automaton of the schema without these counts covers everything else, including the available
room. A grammar of llguidance counts in addition.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.constraint.grammar import JSON_SPACING, CompiledGrammar, GrammarConstraint
from outpace.constraint.regular import RegularConstraint, TokenLanguage
from outpace.constraint.schema import LARGE_COUNT
from outpace.decoding import Request

NAMED_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that matter for upper counts, by the form of their values."""
LISTED_SUBSCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
INNER_SUBSCHEMAS = ("items", "additionalProperties")
COUNT_KEYWORDS = ("type", "$ref", "maxLength", "maxItems")
"""Keywords that matter for upper counts, by what they have."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedSchema:
    """A compiled schema: its automaton without large counts, and its counts."""

    language: TokenLanguage
    counts: CompiledGrammar

    @classmethod
    def from_language(
        cls,
        language: TokenLanguage,
        schema: Any,
        tokenizer: Tokenizer,
        size: int,
        ends: frozenset[int],
    ) -> CountedSchema:
        """Add the counts of a schema to its automaton without large upper counts.

        Raises:
            ValueError: if llguidance cannot count.
        """
        source = json.dumps(count_schema(schema))
        return cls(
            language,
            CompiledGrammar.from_source(
                "schema", source, tokenizer, size, ends, **JSON_SPACING, coerce_one_of=True
            ),
        )

    @property
    def cache_entries(self) -> int:
        """Size in the cache."""
        return self.language.cache_entries

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the shortest answer; upper counts do not change it."""
        return self.language.min_tokens

    def build_constraint(
        self, *, begin: int, limit: int, mask_id: int, both: bool
    ) -> CountedConstraint:
        """Create the constraint of one answer in slots `begin` to `limit`."""
        counts = self.counts
        return CountedConstraint(
            grammar=counts,
            matcher=counts.matcher.deep_copy(),
            begin=begin,
            mask_id=mask_id,
            regular=self.language.build_constraint(
                begin=begin, limit=limit, mask_id=mask_id, both=False
            ),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class CountedConstraint(GrammarConstraint):
    """Constrain one answer to an automaton and to counts, for left-to-right methods."""

    regular: RegularConstraint

    def ban_tokens(self, row: Tensor, front: Sequence[int]) -> bool:
        """Ban tokens that cannot follow; return False if no answer begins like this."""
        if not GrammarConstraint.ban_tokens(self, row, front):
            return False
        self.regular(row[None], [self.begin + len(front)], [*[-1] * self.begin, *front])
        return True

    def check(self, request: Request) -> None:
        """Raise `ValueError` if the committed tokens do not begin an answer."""
        GrammarConstraint.check(self, request)
        self.regular.check(request)


def count_schema(schema: Any) -> Any:
    """Return the part of a schema with upper counts, which accepts all that the schema accepts."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, rule in schema.items():
        if name in NAMED_SUBSCHEMAS and isinstance(rule, dict):
            found[name] = {key: count_schema(part) for key, part in rule.items()}
        elif name in LISTED_SUBSCHEMAS and isinstance(rule, list):
            found[name] = [count_schema(part) for part in rule]
        elif name in INNER_SUBSCHEMAS:
            found[name] = count_schema(rule)
        elif name in COUNT_KEYWORDS:
            found[name] = rule
    return found


def has_large_counts(schema: Any) -> bool:
    """Return whether a part of a schema has an upper count that its automaton may omit."""
    if isinstance(schema, list):
        return any(map(has_large_counts, schema))
    return isinstance(schema, dict) and any(
        has_large_counts(rule)
        if not isinstance(rule, int | float)
        else name in ("maxLength", "maxItems") and rule > LARGE_COUNT
        for name, rule in schema.items()
    )
