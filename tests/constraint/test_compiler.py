"""What a compiler of constraints needs, keeps and refuses."""

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
from outpace.constraint.compiler import Compiler, Unread
from outpace.constraint.vocabulary import bytes_of
from outpace.decoding import FULL, Decoding, Forward, Kind, Request
from outpace.engine.job import DecodingError
from outpace.methods import D2F, Diffusion, Method

ENDS = frozenset({0})
GIVEN: dict[str, Any] = {"sequential": True, "begin": 0, "limit": 8, "size": 6, "ends": ENDS}


def words() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words, and no bytes."""
    known = {word: number for number, word in enumerate(["</s>", "a", "b", "c", "d", "e"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(known, unk_token="a")))


def pieces() -> PreTrainedTokenizerFast:
    """A tokenizer of pieces that falls back to bytes."""
    names = ["</s>", "<0x0A>", "<0xC3>", "\u2581a", "\u00e9", "b"]
    known = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(known, [], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_pieces_are_text_or_bytes() -> None:
    """Marks are spaces, special tokens are nothing, and rows without a token neither."""
    expected = [None, b"\n", b"\xc3", b" a", b"\xc3\xa9", b"b", None, None]
    assert bytes_of(pieces(), 8) == expected


def test_a_tokenizer_without_bytes_is_refused() -> None:
    """And so is none at all, and a model that cannot end an answer."""
    with pytest.raises(ValueError, match="^regex: its tokenizer is neither byte-level nor falls"):
        Compiler(words(), None).constraint(("regex", "a"), **GIVEN)
    with pytest.raises(ValueError, match="^regex: the model has no tokenizer"):
        Compiler(None, None).constraint(("regex", "a"), **GIVEN)
    with pytest.raises(ValueError, match="^regex: an answer needs an end-of-sequence"):
        Compiler(pieces(), None).constraint(("regex", "a"), **{**GIVEN, "ends": frozenset()})


def test_what_no_tokens_can_say_is_refused() -> None:
    """However long the room."""
    with pytest.raises(ValueError, match="^regex: no text of its tokens fulfils it"):
        Compiler(pieces(), None).constraint(("regex", "xyz"), **GIVEN)


def test_llguidance_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one line says what to install, and the rest goes on."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    one = Compiler(pieces(), None)
    with pytest.raises(ValueError, match=r"^grammar: it needs llguidance: pip install 'outpace\["):
        one.constraint(("grammar", 'start: "b"'), **GIVEN)
    assert one.constraint(("regex", "b"), **GIVEN)


def test_only_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as memory goes; the same is not read twice."""
    one = Compiler(pieces(), None)
    one.constraint(("regex", "b"), **GIVEN)
    first = next(iter(one.known.values()))
    one.constraint(("regex", "b"), **GIVEN)
    assert list(one.known.values()) == [first]
    monkeypatch.setattr(compiler, "MEMORY", first.size + 1)
    for number in range(2, 6):
        one.constraint(("regex", f"b{{{number}}}"), **GIVEN)
        assert len(one.known) == 1


def test_who_does_not_wait_reads_later() -> None:
    """What was read for one is there for all; what cannot be read says so in both ways."""
    one = Compiler(pieces(), None)
    with pytest.raises(Unread):
        one.constraint(("regex", "b"), wait=False, **GIVEN)
    assert not one.known
    one.constraint(("regex", "b"), **GIVEN)
    assert one.constraint(("regex", "b"), wait=False, **GIVEN)
    with pytest.raises(Unread):
        one.constraint(("regex", "["), wait=False, **GIVEN)
    with pytest.raises(ValueError, match="^regex: it is malformed"):
        one.constraint(("regex", "["), **GIVEN)


def test_a_known_constraint_waits_for_nobody() -> None:
    """While another one is read."""
    one = Compiler(pieces(), None)
    first = one.constraint(("regex", "b"), **GIVEN)
    with one.reading:
        again = one.constraint(("regex", "b"), wait=False, **GIVEN)
    assert again is not first and len(one.known) == 1


def test_a_canvas_of_whole_blocks_says_where_an_answer_is_cut() -> None:
    """Its method leaves slots at the end alone."""
    (output,) = LLM("tiny-dream").generate(
        "How many?", regex="x{20}", max_tokens=20, method=D2F(block=16, canvas=True)
    )
    assert output.finish_reason == "length" and output.text == "x" * len(output.text)


def test_a_free_neighbour_is_served_while_others_are_refused() -> None:
    """A request that is refused takes nothing from others, and no time from the engine."""
    llm = LLM("tiny-dream", Diffusion(steps=8, canvas=True))
    answer = llm.submit("How many?", max_tokens=16)
    began = time.process_time()
    for _ in range(3):
        with pytest.raises(ValueError, match="too large"):
            llm.submit("How many?", max_tokens=16, regex="(a|b)*a(a|b){30}")
    assert time.process_time() - began < 3
    while not answer.job.over:
        llm.driver.step()
    assert answer.output().ids == llm.generate("How many?", max_tokens=16)[0].ids


@dataclass(frozen=True, kw_only=True)
class Careless(Method):
    """Takes several holes of one forward without saying so."""

    decodes = (Kind.DIFFUSION,)

    def decode(self, request: Request) -> Decoding:
        """All of them at once."""
        begin = len(request)
        out = yield Forward(
            ids=request.ids + [request.target.mask_id] * request.max_tokens,
            start=0,
            pattern=FULL,
            predict=range(begin, request.limit),
            read=request.sample(),
        )
        request.commit(out.tokens)


def test_what_breaks_a_constraint_is_no_answer() -> None:
    """A method that commits it fails, with the token and its slot."""
    llm = LLM("tiny-dream")
    with pytest.raises(DecodingError, match="token .* at slot .* breaks the constraint"):
        llm.generate("Go", regex="(ab|ba){3}|(cd|dc){3}", max_tokens=8, method=Careless())
