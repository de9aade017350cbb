"""Answers that a grammar derives, from left to right, by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.constraint.pattern import TooLarge
from outpace.decoding import Request
from outpace.decoding.joint import Fit
from outpace.decoding.processor import NEVER
from outpace.decoding.sampling import chooser

SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space of JSON as answers by a schema have it: a blank at most after commas and colons."""

INSTALL = "it needs llguidance: pip install 'outpace[constrain]'"


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A grammar that was read once; `matcher` is at the beginning of an answer."""

    matcher: Any
    ends: frozenset[int]

    @classmethod
    def of(
        cls,
        kind: str,
        source: str,
        tokenizer: Tokenizer,
        size: int,
        ends: frozenset[int],
        **options: Any,
    ) -> Grammar:
        """A Lark `grammar` or a JSON `schema` over the first `size` tokens.

        `options` are those of llguidance's compiler of schemas. Raises `ValueError` with what
        llguidance says where it cannot follow it.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError(INSTALL) from error
        read: dict[str, Callable[[str], str]] = {
            "grammar": lambda text: LLMatcher.grammar_from_lark(spaced(text)),
            "schema": lambda text: LLMatcher.grammar_from_json_schema(
                text,
                overrides=options,  # type: ignore[arg-type]
            ),
        }
        tokens = from_tokenizer(tokenizer, n_vocab=size, eos_token=min(ends))  # type: ignore[arg-type]
        matcher = LLMatcher(tokens, read[kind](source), log_level=0)
        if matcher.is_error():
            raise ValueError(first_line(matcher.get_error()))
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if not bits.any() or matcher.is_error():  # as it now may be, with a mask all the same
            raise ValueError("no text at all fulfils it")
        return cls(matcher, ends)

    @property
    def size(self) -> int:
        """What it counts for in a cache: next to nothing."""
        return 1

    @property
    def shortest(self) -> int:
        """Tokens of the shortest answer at least: how many it takes is not known."""
        return 0

    def constraint(self, *, begin: int, limit: int, mask_id: int, both: bool) -> Derived:
        """What holds one answer to it, which fills slots from `begin` on, without holes."""
        return Derived(grammar=self, matcher=self.matcher.deep_copy(), begin=begin, mask_id=mask_id)


@dataclass(slots=True, kw_only=True, eq=False)
class Derived:
    """Holds one answer to a grammar, for methods that commit from left to right.

    Each row is bound by what is known in front of it. Holes that are filled together are chosen
    from left to right, each bound by those in front: no choice leads nowhere, but they are not the
    most probable ones of all that fit, nor is the answer sure to end in front of the limit.
    """

    grammar: Grammar
    matcher: Any
    begin: int
    mask_id: int
    tokens: list[int] = field(default_factory=list)
    """What the matcher has seen."""

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`, each row by what is known of `text` in front."""
        for row, slot in zip(logits, slots, strict=True):
            self.ban(row, text[self.begin : slot])

    def ban(self, row: Tensor, front: Sequence[int]) -> bool:
        """Ban what cannot follow; False where that is no matter, as no answer begins so."""
        if self.mask_id in front or not self.walk(front):
            return False
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(row)].astype(bool)
        allowed[list(self.grammar.ends)] = self.matcher.is_accepting()
        banned = torch.from_numpy(~allowed).to(row.device)
        row[: len(banned)].masked_fill_(banned, NEVER)
        return True

    def forced(self, ids: Sequence[int]) -> list[int]:
        """None are looked for."""
        return []

    def walk(self, tokens: Sequence[int]) -> bool:
        """Let the matcher see tokens, and no others; whether they are part of an answer."""
        pairs = enumerate(zip(tokens, self.tokens, strict=False))
        same = next((n for n, (a, b) in pairs if a != b), min(len(tokens), len(self.tokens)))
        if same < len(self.tokens):
            self.matcher.rollback(len(self.tokens) - same)
            del self.tokens[same:]
        rest = list(tokens[same:])
        if self.grammar.ends.intersection(rest):
            return False
        if rest:
            self.tokens += rest[: self.matcher.try_consume_tokens(rest)]
        if self.matcher.is_error():
            raise TooLarge(f"the grammar is too complex: {first_line(self.matcher.get_error())}")
        return len(self.tokens) == len(tokens)

    @staticmethod
    def together(asked: Sequence[Fit], logits: Tensor, tokens: Tensor) -> None:
        """Choose the tokens of holes from left to right; each is bound by those in front."""
        for own, rows, slots, read in asked:
            assert read.joint is not None
            front = list(read.joint.text[own.begin : slots[0]])
            for row, slot in zip(rows, slots, strict=True):
                if len(front) == slot - own.begin and own.ban(logits[row], front):
                    choose = chooser([read.sampling], [read.step], [[slot]], logits.device)
                    tokens[row] = choose(logits[row : row + 1], slice(0, 1))[0]
                front.append(int(tokens[row]))

    def check(self, request: Request) -> None:
        """Raise `ValueError` where what was committed is no beginning of an answer."""
        if not self.walk(request.tokens):
            slot = self.begin + len(self.tokens)
            raise ValueError(f"token {request.ids[slot]} at slot {slot} breaks the constraint")
        whole = self.matcher.is_accepting()
        if request.finish_reason == "stop" and not whole:
            raise ValueError(f"the answer ends at slot {len(request)} before it is whole")
        if request.finish_reason == "length" and whole:
            request.finish_reason = "stop"


def spaced(lark: str) -> str:
    """A grammar whose schemas (`%json {…}`) bound white space, unless they say otherwise."""
    options = json.dumps({"x-guidance": SPACES})[:-1]
    return re.sub(
        r"%json\s*\{(\s*\})?", lambda found: f"%json {options}{'}' if found[1] else ', '}", lark
    )


def first_line(text: str) -> str:
    """The first line of a message that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason is given")
