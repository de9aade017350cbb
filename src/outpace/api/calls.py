"""Calls of tools in the text of an answer, whole or as it grows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from outpace.api.codec import overlap_length
from outpace.constraint.calls import CallFormat


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
        self.part: Literal["text", "name", "arguments", "after"] = "text"
        self.has_preface = False
        self.depth = 0
        self.is_quoted = self.is_escaped = False

    @property
    def has_call(self) -> bool:
        """Whether a call has begun, so that no more text follows."""
        return self.part != "text" or self.buffer.startswith(self.form.marker)

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
        if end is not None:
            self.part = "after"
        name, arguments = self.calls[-1]
        self.calls[-1] = ToolCall(name, arguments + piece)
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
