"""Parts of an answer, whole or as it grows: thoughts, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from outpace.api.codec import overlap_length
from outpace.constraint.calls import CallFormat
from outpace.constraint.thoughts import MAX_GAP, ThoughtFormat
from outpace.tokenizer import Tokenizer


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: Name of the function.
        arguments: Its arguments, a JSON object.
    """

    name: str
    arguments: str


class CallDelta(NamedTuple):
    """New text of a call.

    Attributes:
        number: Number of the call in its answer.
        name: Name of the function, when the call begins.
        arguments: Next characters of the arguments.
    """

    number: int
    name: str | None
    arguments: str


MAX_CALLS = 128
"""Maximum number of calls in an answer."""

MAX_EQUAL_CALLS = 3
"""Number of equal calls in a row that end an answer: a model may intend two, a loop has no end."""


class CallParser:
    """Splits a growing answer into text and calls.

    Attributes:
        text: Text of the answer so far, without calls.
        calls: Calls so far; the last may be unfinished.
    """

    def __init__(self, form: CallFormat) -> None:
        self.form = form
        self.text = ""
        self.calls: list[ToolCall] = []
        self.buffer = ""
        self.part: Literal["text", "name", "arguments", "after", "over"] = "text"
        self.has_preface = False
        self.depth = 0
        self.is_quoted = self.is_escaped = False

    @property
    def has_call(self) -> bool:
        """Whether a call has begun, so that no more text follows."""
        return self.part != "text" or self.buffer.startswith(self.form.marker)

    @property
    def rest(self) -> str | None:
        """Text after the call with which the answer must end; None without such a call."""
        return self.buffer if self.part == "over" else None

    def feed(self, piece: str) -> tuple[str, list[CallDelta]]:
        """Return new text, and new characters of each call; text that may begin a call waits."""
        self.buffer += piece
        sent, deltas = len(self.text), dict[int, CallDelta]()
        while (delta := self.take_part()) is not None:
            if isinstance(delta, CallDelta):
                before = deltas.get(delta.number, CallDelta(delta.number, None, ""))
                arguments = before.arguments + delta.arguments
                deltas[delta.number] = CallDelta(delta.number, before.name or delta.name, arguments)
        return self.text[sent:], [*deltas.values()]

    def finish(self) -> str:
        """Return the text that waited; the answer is over."""
        if self.part != "text":
            if self.part == "arguments":
                self.calls.pop()
            return ""
        rest, self.buffer = self.buffer, ""
        self.text += rest
        return rest

    def take_part(self) -> CallDelta | Literal[True] | None:
        """Consume a part of the buffer; None if it must grow first, True if no call has grown."""
        match self.part:
            case "text":
                return self.take_text()
            case "name":
                name, found, rest = self.buffer.partition(self.form.middle)
                if not found:
                    return None
                self.buffer = rest
                return self.begin_call(name)
            case "arguments":
                return self.take_arguments()
            case "over":
                return None
        between = self.form.between
        if between is None or not self.buffer.startswith(between):
            return None
        self.buffer, self.part = self.buffer.removeprefix(between), "name"
        return True

    def begin_call(self, name: str) -> CallDelta:
        """Begin a call whose arguments follow."""
        self.part = "arguments"
        self.calls.append(ToolCall(name, ""))
        return CallDelta(len(self.calls) - 1, name, "")

    def take_text(self) -> CallDelta | Literal[True] | None:
        """Move text before a call from the buffer, up to what may be the beginning of one."""
        if self.form.preface and not self.has_preface:
            if self.buffer.startswith(self.form.preface):
                self.buffer, self.has_preface = self.buffer.removeprefix(self.form.preface), True
            elif self.form.preface.startswith(self.buffer):
                return None
        begin, buffer = self.form.begin, self.buffer
        if not self.text and (leading := self.form.leading_texts):
            if (found := next(filter(buffer.startswith, leading), None)) is not None:
                self.form, name = leading[found]
                self.buffer = buffer.removeprefix(found)
                return self.begin_call(name)
            if any(text.startswith(buffer) for text in leading):
                return None
        if self.form.leads:
            is_first = not self.text and not self.has_preface
            at = 0 if is_first and buffer.startswith(begin) else -1
            held = len(buffer) if is_first and begin.startswith(buffer) else 0
        else:
            at, held = buffer.find(begin), overlap_length(buffer, begin)
        end = len(buffer) - held if at < 0 else at
        self.text += buffer[:end]
        self.buffer = buffer[end:] if at < 0 else buffer[end + len(begin) :]
        if at < 0:
            return None
        self.part = "name"
        return True

    def take_arguments(self) -> CallDelta | None:
        """Move characters of the arguments from the buffer, at most to their end."""
        if not self.buffer:
            return None
        end = next((n for n, each in enumerate(self.buffer, 1) if self.closes(each)), None)
        piece, self.buffer = self.buffer[:end], "" if end is None else self.buffer[end:]
        name, arguments = self.calls[-1]
        self.calls[-1] = ToolCall(name, arguments + piece)
        if end is not None:
            equal = self.calls[-MAX_EQUAL_CALLS:].count(self.calls[-1])
            ends = equal == MAX_EQUAL_CALLS or len(self.calls) == MAX_CALLS
            self.part = "over" if ends else "after"
        return CallDelta(len(self.calls) - 1, None, piece)

    def closes(self, character: str) -> bool:
        """Read one character of the arguments; return whether it closes the outermost object."""
        if self.is_escaped:
            self.is_escaped = False
        elif self.is_quoted:
            self.is_escaped = character == "\\"
            self.is_quoted = character != '"'
        elif character == '"':
            self.is_quoted = True
        else:
            self.depth += (character in "{[") - (character in "}]")
            return self.depth == 0 and character == "}"
        return False


def call_object(identity: str, call: ToolCall) -> dict[str, Any]:
    """Return a call as OpenAI's messages hold it."""
    return {
        "id": identity,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


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

    @property
    def rest(self) -> str | None:
        """Text after the call with which the answer must end; None without such a call."""
        return None if self.call_parser is None else self.call_parser.rest

    def feed(self, piece: str, *, final: bool = False) -> PartsDelta:
        """Return new characters of each part; text that may be a mark waits, unless `final`."""
        reasoning, text = "", piece
        if self.thoughts is not None:
            reasoning, text = self.thoughts.feed(piece)
            if final:
                late_reasoning, late_text = self.thoughts.finish()
                reasoning, text = reasoning + late_reasoning, text + late_text
        calls: Sequence[CallDelta] = ()
        if self.call_parser is not None and (text or final):
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
