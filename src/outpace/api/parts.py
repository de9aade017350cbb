"""Parts of an answer, whole or as it grows: thoughts, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outpace.constraint.calls import CallFormat, CallParser, ToolCall
from outpace.constraint.thoughts import ThoughtFormat, ThoughtParser
from outpace.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerFormat:
    """Format of the parts of an answer."""

    thoughts: ThoughtFormat | None = None
    """Format of thoughts before the answer; None if there are none."""
    calls: CallFormat | None = None
    """Format of calls of tools; None if there can be none."""

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


class CallDelta(NamedTuple):
    """New text of a call."""

    number: int
    """Number of the call in its answer."""
    name: str | None
    """Name of the function, when the call begins."""
    arguments: str
    """Next characters of the arguments."""


class PartsDelta(NamedTuple):
    """New characters of the parts of an answer."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[CallDelta] = ()
    """At most one entry per call."""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)

    def extend(self, later: PartsDelta) -> PartsDelta:
        """Return the characters of two deltas that follow each other."""
        calls = {each.number: each for each in self.calls}
        for each in later.calls:
            before = calls.get(each.number, each._replace(arguments=""))
            arguments = before.arguments + each.arguments
            calls[each.number] = before._replace(arguments=arguments)
        reasoning, text = self.reasoning + later.reasoning, self.text + later.text
        return PartsDelta(reasoning, text, [*calls.values()])


class AnswerParts(NamedTuple):
    """The parts of a whole answer."""

    reasoning: str
    text: str
    calls: list[ToolCall]


class AnswerParser:
    """Splits a growing answer into its parts."""

    def __init__(self, form: AnswerFormat) -> None:
        self.thoughts = None if form.thoughts is None else ThoughtParser(form.thoughts)
        self.call_parser = None if form.calls is None else CallParser(form.calls)
        self.reasoning = self.text = ""
        self.taken_reasoning = self.taken_text = 0
        self.taken_arguments: list[int] = []
        """Characters of each call's arguments that were taken."""

    @property
    def calls(self) -> list[ToolCall]:
        """Calls so far; the last may be unfinished."""
        return [] if self.call_parser is None else self.call_parser.calls

    @property
    def parts(self) -> AnswerParts:
        """Parts so far."""
        return AnswerParts(self.reasoning, self.text, self.calls)

    @property
    def has_call(self) -> bool:
        """Whether a call has begun, so that no more text follows."""
        return self.call_parser is not None and self.call_parser.has_call

    @property
    def rest(self) -> str | None:
        """Text after the call with which the answer must end; None without such a call."""
        return None if self.call_parser is None else self.call_parser.rest

    def feed(self, piece: str, *, final: bool = False) -> None:
        """Read the next characters; text that may be a mark waits, unless `final`."""
        reasoning, text = "", piece
        if self.thoughts is not None:
            reasoning, text = self.thoughts.feed(piece)
            if final:
                late_reasoning, late_text = self.thoughts.finish()
                reasoning, text = reasoning + late_reasoning, text + late_text
        self.reasoning += reasoning
        if self.call_parser is None:
            self.text += text
            return
        self.call_parser.feed(text)
        if final:
            self.call_parser.finish()
        self.text = self.call_parser.text

    def take(self) -> PartsDelta:
        """Return the characters of each part since the last call."""
        calls, places = [], self.taken_arguments
        for number in range(max(len(places) - 1, 0), len(self.calls)):
            name, arguments = self.calls[number]
            is_new = number == len(places)
            begin, places[number:] = 0 if is_new else places[number], [len(arguments)]
            if is_new or begin < len(arguments):
                calls.append(CallDelta(number, name if is_new else None, arguments[begin:]))
        reasoning, text = self.reasoning[self.taken_reasoning :], self.text[self.taken_text :]
        self.taken_reasoning, self.taken_text = len(self.reasoning), len(self.text)
        return PartsDelta(reasoning, text, calls)


def parse_answer(form: AnswerFormat, text: str) -> AnswerParts:
    """Return the parts of a whole answer."""
    parser = AnswerParser(form)
    parser.feed(text, final=True)
    return parser.parts


def call_object(identity: str, call: ToolCall) -> dict[str, Any]:
    """Return a call as OpenAI's messages hold it."""
    return {
        "id": identity,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def assistant_message(parts: AnswerParts, identify: Callable[[int], str]) -> dict[str, Any]:
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
