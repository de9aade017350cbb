"""Parts of an answer, whole or as it grows: thoughts, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.api.calls import CallDelta, CallParser, ToolCall, call_object
from outpace.api.codec import overlap_length
from outpace.constraint.calls import CallFormat
from outpace.constraint.thoughts import MAX_GAP, ThoughtFormat


@dataclass(frozen=True)
class AnswerFormat:
    """Format of the parts of an answer.

    Attributes:
        thoughts: Format of thoughts before the answer; None if there are none.
        calls: Format of calls of tools; None if there can be none.
    """

    thoughts: ThoughtFormat | None = None
    calls: CallFormat | None = None

    def special_tokens(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Return the special tokens that are part of the format, by id."""
        formats = (each for each in (self.thoughts, self.calls) if each is not None)
        return {
            token: text
            for form in formats
            for token, text in form.special_tokens(tokenizer).items()
        }


PLAIN_FORMAT = AnswerFormat()
"""Format of an answer that is text only."""


@dataclass(frozen=True, slots=True)
class PartsDelta:
    """New characters of the parts of an answer.

    Attributes:
        reasoning: Of the thoughts.
        text: Of the text.
        calls: Of the calls, at most one entry per call.
    """

    reasoning: str = ""
    text: str = ""
    calls: Sequence[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class ThoughtParser:
    """Splits a growing answer into thoughts and the rest, without the line breaks around them."""

    def __init__(self, form: ThoughtFormat) -> None:
        self.form = form
        self.buffer = ""
        self.part: Literal["start", "thoughts", "gap", "answer"] = "start"
        self.is_blank = True
        self.gap = 0

    @property
    def has_ended(self) -> bool:
        """Whether the thoughts are over."""
        return self.part in ("gap", "answer")

    def feed(self, piece: str) -> tuple[str, str]:
        """Return new characters of the thoughts and of the answer; marks and breaks wait."""
        self.buffer += piece
        if self.part == "start":
            self.take_start()
        thoughts = self.take_thoughts() if self.part == "thoughts" else ""
        if self.part == "gap":
            while self.gap < MAX_GAP and self.buffer.startswith("\n"):
                self.buffer, self.gap = self.buffer[1:], self.gap + 1
            self.part = "answer" if self.buffer else "gap"
        if self.part != "answer":
            return thoughts, ""
        rest, self.buffer = self.buffer, ""
        return thoughts, rest

    def finish(self) -> tuple[str, str]:
        """Return the characters that waited; the answer is over."""
        rest, self.buffer = self.buffer, ""
        return (rest.rstrip("\n"), "") if self.part == "thoughts" else ("", rest)

    def take_start(self) -> None:
        """Read the text before thoughts or an answer, once it is complete."""
        form, buffer = self.form, self.buffer
        if buffer.startswith(form.begin):
            self.buffer, self.part = buffer.removeprefix(form.begin), "thoughts"
        elif form.direct and buffer.startswith(form.direct):
            self.buffer, self.part = buffer.removeprefix(form.direct), "answer"
        elif not any(mark.startswith(buffer) for mark in (form.begin, form.direct)):
            self.part = "answer"

    def take_thoughts(self) -> str:
        """Return thoughts from the buffer, up to what may be the end or line breaks before it."""
        if self.is_blank:
            self.buffer = self.buffer.lstrip("\n")
        at = self.buffer.find(self.form.end)
        if at >= 0:
            found, self.part = self.buffer[:at].rstrip("\n"), "gap"
            self.buffer = self.buffer[at + len(self.form.end) :]
            return found
        held = overlap_length(self.buffer, self.form.end)
        found = self.buffer[: len(self.buffer) - held].rstrip("\n")
        self.buffer = self.buffer[len(found) :]
        self.is_blank = self.is_blank and not found
        return found


class AnswerParser:
    """Splits a growing answer into its parts.

    Attributes:
        reasoning: Thoughts so far.
        text: Text so far.
        calls: Calls so far; the last may be unfinished.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self.thoughts = None if form.thoughts is None else ThoughtParser(form.thoughts)
        self.call_parser = None if form.calls is None else CallParser(form.calls)
        self.reasoning = self.text = ""

    @property
    def calls(self) -> list[ToolCall]:
        """Calls so far; the last may be unfinished."""
        return [] if self.call_parser is None else self.call_parser.calls

    @property
    def has_call(self) -> bool:
        """Whether a call has begun, so that no more text follows."""
        return self.call_parser is not None and self.call_parser.has_call

    def feed(self, piece: str, *, final: bool = False) -> PartsDelta:
        """Return new characters of each part; text that may be a mark waits, unless `final`."""
        reasoning, text = "", piece
        if self.thoughts is not None:
            reasoning, text = self.thoughts.feed(piece)
            if final:
                late_reasoning, late_text = self.thoughts.finish()
                reasoning, text = reasoning + late_reasoning, text + late_text
        calls: Sequence[CallDelta] = ()
        if self.call_parser is not None:
            text, calls = self.call_parser.feed(text)
            text += self.call_parser.finish() if final else ""
        self.reasoning += reasoning
        self.text += text
        return PartsDelta(reasoning, text, calls)


def parse_answer(form: AnswerFormat, text: str) -> AnswerParser:
    """Return the parser of a whole answer, which holds its parts."""
    parser = AnswerParser(form)
    parser.feed(text, final=True)
    return parser


def assistant_message(parts: AnswerParser, identify: Callable[[int], str]) -> dict[str, Any]:
    """Return an answer as a message; `identify` returns the id of a call by its number."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.text}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.calls:
        message["content"] = parts.text or None
        message["tool_calls"] = [
            call_object(identify(number), call) for number, call in enumerate(parts.calls)
        ]
    return message
