"""Constraints by a grammar, decoded from left to right by llguidance."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from outpace.constraint.lark import check_grammar
from outpace.constraint.pattern import TooLargeError
from outpace.decoding import Request
from outpace.decoding.processor import BANNED_LOGIT
from outpace.decoding.sampling import JointRows, row_chooser
from outpace.errors import install_extra
from outpace.tokenizer import Tokenizer

JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space in JSON answers: at most one space after commas and colons."""

INSTALL_LLGUIDANCE = f"it {install_extra('constrain')}"


T = TypeVar("T")

STACK_BYTES = 256 * 2**20
"""Stack of the thread that compiles; deep grammars were measured to use up to half of it."""

COMPILATION_NICENESS = 10
"""Niceness of that thread, which shares the cores with the engine."""

STACK_LOCK = threading.Lock()

BYTES_PER_CHARACTER = 400
BYTES_PER_SECOND = 100 * 2**20
"""Approximate upper bounds of the memory of a compiled grammar: 40 MiB for a text of 90,000
characters, 165 MiB for nested repeats that are compiled in two seconds of one core."""


def run_with_large_stack(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1, "outpace-grammar", lower_priority) as pool:
        with STACK_LOCK:
            usual = threading.stack_size(STACK_BYTES)
            try:
                found = pool.submit(work)
            finally:
                threading.stack_size(usual)
        return found.result()


def lower_priority() -> None:
    """Let other threads compute first; only for one that rarely holds the interpreter's lock."""
    if sys.platform == "linux":
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILATION_NICENESS)


@dataclass(frozen=True, slots=True, eq=False)
class GrammarVocabulary:
    """The tokens of a model for llguidance, shared by all grammars."""

    tokens: Any
    """The vocabulary, which takes tens of MiB."""
    eos: int
    """Token that ends answers in `tokens`; never text."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, size: int, eos: int) -> GrammarVocabulary:
        """Read the first `size` tokens. Raises `ValueError` without llguidance."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(INSTALL_LLGUIDANCE) from error
        source = tokenizer.backend_tokenizer.to_str()
        return cls(LLTokenizer(source, n_vocab=size, eos_token=eos), eos)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar; `matcher` is in its initial state."""

    matcher: Any
    eos: int
    ends: frozenset[int]
    cached_bytes: int
    """Approximate memory that it holds, without the vocabulary."""

    @classmethod
    def from_source(
        cls,
        kind: str,
        source: str,
        vocabulary: GrammarVocabulary,
        ends: frozenset[int],
        **options: Any,
    ) -> CompiledGrammar:
        """Compile a Lark `grammar` or a JSON `schema`."""
        if kind == "grammar":
            check_grammar(source)
        compile_once = partial(compile_matcher, vocabulary.tokens, kind, source, options)
        matcher, seconds = run_with_large_stack(compile_once)
        size = int(seconds * BYTES_PER_SECOND) + len(source) * BYTES_PER_CHARACTER
        return cls(matcher, vocabulary.eos, ends, size)

    @property
    def min_tokens(self) -> int:
        return 0

    def build_constraint(
        self, *, begin: int, limit: int, mask_id: int, both: bool
    ) -> GrammarConstraint:
        return GrammarConstraint(
            grammar=self, matcher=self.matcher.deep_copy(), begin=begin, mask_id=mask_id
        )


def compile_matcher(tokens: Any, kind: str, source: str, options: Any) -> tuple[Any, float]:
    from llguidance import LLMatcher

    began = time.thread_time()
    if kind == "grammar":
        grammar = LLMatcher.grammar_from_lark(add_spacing(source))
    else:
        grammar = LLMatcher.grammar_from_json_schema(source, overrides=options)
    matcher = LLMatcher(tokens, grammar, log_level=0)
    seconds = time.thread_time() - began
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))
    probe = matcher.deep_copy()  # what a mask adds is not cached
    bits = np.frombuffer(probe.compute_bitmask(), dtype=np.uint8)
    if not bits.any() or probe.is_error():  # computing the mask may set the error
        raise ValueError("no text matches it")
    return matcher, seconds


@dataclass(slots=True, kw_only=True, eq=False)
class GrammarConstraint:
    """Constrain one answer to a grammar, for methods that commit from left to right."""

    # Each row depends on the tokens before it. Holes that are filled together are sampled from left
    # to right, each given those before it. The choice never reaches a dead end, but it is not the
    # most probable one of all that fit, and the answer may not end before the limit.

    grammar: CompiledGrammar
    matcher: Any
    begin: int
    mask_id: int
    tokens: list[int] = field(default_factory=list)
    """Tokens that the matcher has consumed."""

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        for row, slot in zip(logits, slots, strict=True):
            self.ban_tokens(row, text[self.begin : slot])

    def ban_tokens(self, row: Tensor, prefix: Sequence[int]) -> bool:
        """Ban tokens that cannot follow; return False if no answer begins like this."""
        if self.mask_id in prefix or not self.consume_tokens(prefix):
            return False
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: len(row)].astype(bool)
        allowed[self.grammar.eos] = False
        allowed[list(self.grammar.ends)] = self.matcher.is_accepting()
        banned = torch.from_numpy(~allowed).to(row.device)
        row[: len(banned)].masked_fill_(banned, BANNED_LOGIT)
        return True

    def forced_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return no tokens; forced ones are not searched for."""
        return []

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Make exactly these tokens the matcher's state; return whether they begin an answer."""
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
            raise TooLargeError(
                f"the grammar is too complex: {first_line(self.matcher.get_error())}"
            )
        return len(self.tokens) == len(tokens)

    @staticmethod
    def choose_jointly(asked: Sequence[JointRows], logits: Tensor, tokens: Tensor) -> None:
        """Sample the tokens of holes from left to right, each given those before it."""
        for own, rows, slots, read in asked:
            assert read.joint is not None
            prefix = list(read.joint.text[own.begin : slots[0]])
            for row, slot in zip(rows, slots, strict=True):
                if len(prefix) == slot - own.begin and own.ban_tokens(logits[row], prefix):
                    choose = row_chooser([read.sampling], [read.step], [[slot]], logits.device)
                    tokens[row] = choose(logits[row : row + 1], slice(0, 1))[0]
                prefix.append(int(tokens[row]))

    def check(self, request: Request) -> None:
        if not self.consume_tokens(request.tokens):
            slot = self.begin + len(self.tokens)
            raise ValueError(f"token {request.ids[slot]} at slot {slot} violates the constraint")
        whole = self.matcher.is_accepting()
        if request.finish_reason == "stop" and not whole:
            raise ValueError(f"the answer ends at slot {len(request)} before it is complete")
        if request.finish_reason == "length" and whole:
            request.finish_reason = "stop"


def add_spacing(lark: str) -> str:
    """Add bounds on whitespace to the schemas of a grammar (`%json {…}`) by default."""
    options = json.dumps({"x-guidance": JSON_SPACING})[:-1]
    return re.sub(
        r"%json\s*\{(\s*\})?", lambda found: f"%json {options}{'}' if found[1] else ', '}", lark
    )


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
