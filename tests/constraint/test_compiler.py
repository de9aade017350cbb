"""Test what a constraint compiler requires, caches and refuses."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from outpace import LLM
from outpace.constraint import compiler
from outpace.constraint.compiler import Compiler, NotCompiledError
from outpace.constraint.vocabulary import token_bytes
from outpace.decoding import FULL, Decoding, Forward, Kind, Request
from outpace.engine.job import DecodingError
from outpace.methods import D2F, Diffusion, Method

ENDS = frozenset({0})
GIVEN: dict[str, Any] = {"sequential": True, "begin": 0, "limit": 8, "size": 6, "ends": ENDS}


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words without bytes."""
    known = {word: number for number, word in enumerate(["</s>", "a", "b", "c", "d", "e"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(known, unk_token="a")))


def pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer with byte fallback."""
    names = ["</s>", "<0x0A>", "<0xC3>", "\u2581a", "\u00e9", "b"]
    known = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(known, [], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_pieces_are_text_or_bytes() -> None:
    expected = [None, b"\n", b"\xc3", b" a", b"\xc3\xa9", b"b", None, None]
    assert token_bytes(pieces(), 8) == expected


def test_a_tokenizer_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="^regex: its tokenizer is neither byte-level nor falls"):
        Compiler(words(), None).build_constraint(("regex", "a"), **GIVEN)
    with pytest.raises(ValueError, match="^regex: the model has no tokenizer"):
        Compiler(None, None).build_constraint(("regex", "a"), **GIVEN)
    with pytest.raises(ValueError, match="^regex: a constraint requires an end-of-sequence"):
        Compiler(pieces(), None).build_constraint(("regex", "a"), **{**GIVEN, "ends": frozenset()})


def test_unspellable_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="^regex: no text of the model's tokens matches it"):
        Compiler(pieces(), None).build_constraint(("regex", "xyz"), **GIVEN)


def test_llguidance_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    one = Compiler(pieces(), None)
    with pytest.raises(
        ValueError, match=r"^grammar: it requires llguidance: pip install 'outpace\["
    ):
        one.build_constraint(("grammar", 'start: "b"'), **GIVEN)
    assert one.build_constraint(("regex", "b"), **GIVEN)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Compiler(pieces(), None)
    one.build_constraint(("regex", "b"), **GIVEN)
    first = next(iter(one.compiled_rules.values()))
    one.build_constraint(("regex", "b"), **GIVEN)
    assert list(one.compiled_rules.values()) == [first]
    monkeypatch.setattr(compiler, "MAX_CACHED_ENTRIES", first.cache_entries + 1)
    for number in range(2, 6):
        one.build_constraint(("regex", f"b{{{number}}}"), **GIVEN)
        assert len(one.compiled_rules) == 1


def test_without_wait_a_rule_is_not_compiled() -> None:
    one = Compiler(pieces(), None)
    with pytest.raises(NotCompiledError):
        one.build_constraint(("regex", "b"), wait=False, **GIVEN)
    assert not one.compiled_rules
    one.build_constraint(("regex", "b"), **GIVEN)
    assert one.build_constraint(("regex", "b"), wait=False, **GIVEN)
    with pytest.raises(NotCompiledError):
        one.build_constraint(("regex", "["), wait=False, **GIVEN)
    with pytest.raises(ValueError, match="^regex: it is malformed"):
        one.build_constraint(("regex", "["), **GIVEN)


def test_a_cached_constraint_does_not_wait() -> None:
    one = Compiler(pieces(), None)
    first = one.build_constraint(("regex", "b"), **GIVEN)
    with one.compile_lock:
        again = one.build_constraint(("regex", "b"), wait=False, **GIVEN)
    assert again is not first and len(one.compiled_rules) == 1


def test_a_canvas_of_whole_blocks_limits_the_answer() -> None:
    (output,) = LLM("tiny-dream").generate(
        "How many?", regex="x{20}", max_tokens=20, method=D2F(block=16, canvas=True)
    )
    assert output.finish_reason == "length" and output.text == "x" * len(output.text)


def test_a_free_neighbour_is_served_while_others_are_refused() -> None:
    llm = LLM("tiny-dream", Diffusion(steps=8, canvas=True))
    answer = llm.submit("How many?", max_tokens=16)
    began = time.process_time()
    for _ in range(3):
        with pytest.raises(ValueError, match="too large"):
            llm.submit("How many?", max_tokens=16, regex="(a|b)*a(a|b){30}")
    assert time.process_time() - began < 12
    while not answer.job.is_finished:
        llm.driver.step()
    assert answer.build_output().ids == llm.generate("How many?", max_tokens=16)[0].ids


@dataclass(frozen=True, kw_only=True)
class Careless(Method):
    """Fills several holes of one forward without a joint read."""

    target_kinds = (Kind.DIFFUSION,)

    def decode(self, request: Request) -> Decoding:
        """Fill all of them at once."""
        begin = len(request)
        out = yield Forward(
            ids=request.ids + [request.target.mask_id] * request.max_tokens,
            start=0,
            pattern=FULL,
            predict=range(begin, request.limit),
            read=request.sample(),
        )
        request.commit(out.tokens)


def test_violating_a_constraint_fails_the_request() -> None:
    llm = LLM("tiny-dream")
    with pytest.raises(DecodingError, match="token .* at slot .* violates the constraint"):
        llm.generate("Go", regex="(ab|ba){3}|(cd|dc){3}", max_tokens=8, method=Careless())
