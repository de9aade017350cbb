"""Formats in which models write calls of tools: their texts, parser and automaton.

A new format is an entry of `CALL_FORMATS`. Whatever depends on arguments that are a JSON object is
in `CallFormat.write_calls`, `CallParser.closes` and `tools.arguments_dfa`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from outpace.constraint.dfa import Dfa
from outpace.constraint.pattern import TooLargeError
from outpace.constraint.vocabulary import special_tokens_in
from outpace.tokenizer import Tokenizer, overlap_length


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls: `begin name middle arguments (between name middle arguments)* end`.

    The arguments are a JSON object. An answer without a call is `preface text`.
    """

    name: str = "variant"
    marker: str = ""
    """First characters of `begin`. A text with them is a call."""
    begin: str
    middle: str
    between: str | None = None
    """Text before the name of a further function; None if an answer has one call."""
    end: str
    preface: str = ""
    leads: bool = False
    """Whether a call can only be the beginning of an answer."""
    required: tuple[str, ...] = ()
    """Texts that a chat template of this format contains."""
    foreign: tuple[str, ...] = ()
    """Texts of chat templates whose calls are similar, but not of this format."""
    variants: tuple[CallFormat, ...] = ()
    """Formats that models of such templates write at the beginning of an answer instead.

    There, only the name of a declared function makes a text a call."""
    names: tuple[str, ...] = ()
    """Declared functions, if calls may be of a variant."""

    @property
    def leading_texts(self) -> dict[str, tuple[CallFormat, str]]:
        """Texts that begin a call of a variant, each with the variant and the function."""
        pairs = product(self.variants, self.names)
        return {each.begin + name + each.middle: (each, name) for each, name in pairs}

    def write_calls(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return the text of calls, each a name and its arguments as JSON."""
        texts = [f"{name}{self.middle}{arguments}" for name, arguments in calls]
        return self.begin + (self.between or self.end + self.begin).join(texts) + self.end

    def special_tokens(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Return the special tokens that are part of the format, by id."""
        texts = self.begin, self.middle, self.between or "", self.end, self.preface
        return special_tokens_in(tokenizer, *texts)


def fenced_calls(key: str) -> tuple[CallFormat, CallFormat]:
    """Return the formats of a call in a fence of `json`, in one line and in several."""
    return (
        CallFormat(begin='```json\n{"name": "', middle=f'", "{key}": ', end="}\n```"),
        CallFormat(begin='```json\n{\n  "name": "', middle=f'",\n  "{key}": ', end="\n}\n```"),
    )


def leading_call(name: str, key: str, *required: str) -> CallFormat:
    """Return a format of one call, a JSON object at the beginning of an answer."""
    return CallFormat(
        name=name,
        marker='{"name"',
        begin='{"name": "',
        middle=f'", "{key}": ',
        end="}",
        leads=True,
        required=required,
        variants=fenced_calls(key),
    )


CALL_FORMATS = (
    CallFormat(
        name="tool_call",
        marker="<tool_call>",
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        between='}\n</tool_call>\n<tool_call>\n{"name": "',
        end="}\n</tool_call>",
        required=("<tool_call>", '"name"', '"arguments"'),
        foreign=("<function=", "<arg_key>", "<tool_sep>", "<tool_calls>"),
        variants=(
            CallFormat(
                begin='{"name": "', middle='", "arguments": ', between='}\n{"name": "', end="}"
            ),
            CallFormat(  # as templates of Qwen2.5-Coder write it by mistake
                begin='{{"name": "', middle='", "arguments": ', between='}}\n{{"name": "', end="}}"
            ),
            *fenced_calls("arguments"),
        ),
    ),
    CallFormat(
        name="array",
        marker="[TOOL_CALLS]",
        begin='[TOOL_CALLS][{"name": "',
        middle='", "arguments": ',
        between='}, {"name": "',
        end="}]",
        required=("[TOOL_CALLS]",),
        foreign=("[ARGS]",),
    ),
    CallFormat(
        name="args",
        marker="[TOOL_CALLS]",
        begin="[TOOL_CALLS]",
        middle="[ARGS]",
        between="[TOOL_CALLS]",
        end="",
        required=("[TOOL_CALLS]", "[ARGS]"),
        foreign=("[CALL_ID]",),
    ),
    leading_call("object", "parameters", '{"name": function name, "parameters": dictionary'),
    CallFormat(
        name="harmony",
        marker="<|channel|>commentary",
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        end="",
        preface="<|channel|>final<|message|>",
        leads=True,
        required=("<|channel|>commentary", "functions.", "<|call|>"),
    ),
    GENERIC_FORMAT := leading_call("generic", "arguments"),
)
"""Formats of Hermes, Qwen and SmolLM3; of Mistral up to Small 3.1, and after Small 3.2; of Llama
3.1 and 3.2, and of Gemma 3 as Google's guide to function calling asks for JSON; of gpt-oss, whose
calls end with the end-of-sequence token `<|call|>`; and of all other models, whose prompt declares
tools in a text."""

TOOL_VARIABLES = ("tools", "xml_tools")
"""Variables by which chat templates receive tools, the usual one first."""


def find_call_format(templates: Any) -> CallFormat | None:
    """Return the format of calls that a tokenizer's chat template describes, or the generic one.

    Args:
        templates: A template, or templates by name; None if there are none, and so no calls.
    """
    if templates is None:
        return None
    sources = templates.values() if isinstance(templates, Mapping) else [templates]
    text = "\0".join(sources).replace('\\"', '"')
    return next(
        each
        for each in CALL_FORMATS
        if all(mark in text for mark in each.required)
        and not any(mark in text for mark in each.foreign)
    )


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    """Name of the function."""
    arguments: str
    """Its arguments, a JSON object."""


MAX_CALLS = 128
"""Maximum number of calls in an answer."""

MAX_EQUAL_CALLS = 3
"""Number of equal calls in a row that end an answer: a model may intend two, a loop has no end."""


class CallParser:
    """Splits a growing answer into text and calls."""

    def __init__(self, form: CallFormat) -> None:
        self.form = form
        self.text = ""
        self.calls: list[ToolCall] = []
        """Calls so far; the last may be unfinished."""
        self.buffer = ""
        self.part: Literal["text", "name", "arguments", "after", "over", "cut"] = "text"
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

    def feed(self, piece: str) -> None:
        """Read the next characters; text that may begin a call waits."""
        self.buffer += piece
        while self.take_part():
            pass

    def finish(self) -> None:
        """Move the text that waited, and drop an unfinished call; the answer is over."""
        if self.part == "text":
            self.text, self.buffer = self.text + self.buffer, ""
        elif self.part == "arguments":
            self.calls.pop()
            self.part = "cut"

    def take_part(self) -> bool:
        """Consume a part of the buffer; return whether more can be read."""
        match self.part:
            case "text":
                return self.take_text()
            case "name":
                name, found, rest = self.buffer.partition(self.form.middle)
                if found:
                    self.buffer = rest
                    self.begin_call(name)
                return bool(found)
            case "arguments":
                return self.take_arguments()
            case "over" | "cut":
                return False
        between = self.form.between
        if between is None or not self.buffer.startswith(between):
            return False
        self.buffer, self.part = self.buffer.removeprefix(between), "name"
        return True

    def begin_call(self, name: str) -> None:
        self.part = "arguments"
        self.calls.append(ToolCall(name, ""))

    def take_text(self) -> bool:
        """Move text before a call from the buffer, up to what may be the beginning of one."""
        if self.form.preface and not self.has_preface:
            if self.buffer.startswith(self.form.preface):
                self.buffer, self.has_preface = self.buffer.removeprefix(self.form.preface), True
            elif self.form.preface.startswith(self.buffer):
                return False
        begin, buffer = self.form.begin, self.buffer
        if not self.text and (leading := self.form.leading_texts):
            if (found := next(filter(buffer.startswith, leading), None)) is not None:
                self.form, name = leading[found]
                self.buffer = buffer.removeprefix(found)
                self.begin_call(name)
                return True
            if any(text.startswith(buffer) for text in leading):
                return False
        if self.form.leads:
            is_first = not self.text and not self.has_preface
            at = 0 if is_first and buffer.startswith(begin) else -1
            held = len(buffer) if is_first and begin.startswith(buffer) else 0
        else:
            at, held = buffer.find(begin), overlap_length(buffer, begin)
        end = len(buffer) - held if at < 0 else at
        self.text += buffer[:end]
        self.buffer = buffer[end:] if at < 0 else buffer[end + len(begin) :]
        if at >= 0:
            self.part = "name"
        return at >= 0

    def take_arguments(self) -> bool:
        """Move characters of the arguments from the buffer, at most to their end."""
        if not self.buffer:
            return False
        end = next((n for n, each in enumerate(self.buffer, 1) if self.closes(each)), None)
        piece, self.buffer = self.buffer[:end], "" if end is None else self.buffer[end:]
        name, arguments = self.calls[-1]
        self.calls[-1] = ToolCall(name, arguments + piece)
        if end is not None:
            equal = self.calls[-MAX_EQUAL_CALLS:].count(self.calls[-1])
            ends = equal == MAX_EQUAL_CALLS or len(self.calls) == MAX_CALLS
            self.part = "over" if ends else "after"
        return True

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


MAX_CALL_STATES = 30_000
"""Maximum states of the automaton of calls."""


class CallBuilder:
    """Builds the automaton of calls in a format; see `CallFormat` for what they are.

    Functions with equal arguments share their states.
    """

    def __init__(self, form: CallFormat) -> None:
        self.form = form
        self.starts: dict[bytes, int] = {}
        self.rows: list[dict[int, int]] = [{}]
        self.before_name = self.add_text(0, form.begin)
        self.after_arguments = self.add_state()

    def add_state(self) -> int:
        if len(self.rows) == MAX_CALL_STATES:
            raise TooLargeError(f"it is too large: more than {MAX_CALL_STATES} states")
        self.rows.append({})
        return len(self.rows) - 1

    def add_text(self, state: int, text: str) -> int:
        """Add a text after a state; return the state that it leads to."""
        for byte in text.encode():
            if byte not in self.rows[state]:
                self.rows[state][byte] = self.add_state()
            state = self.rows[state][byte]
        return state

    def add_function(self, name: str, arguments: Dfa) -> None:
        text = name + self.form.middle
        state = self.add_text(self.before_name, text[:-1])
        self.rows[state][ord(text[-1])] = self.add_arguments(arguments)

    def add_arguments(self, arguments: Dfa) -> int:
        """Add arguments, after whose end the call goes on; return the state before them."""
        key = arguments.table.tobytes()
        if key in self.starts:
            return self.starts[key]
        states = [
            self.after_arguments if ends else self.add_state()
            for ends in arguments.accepts.tolist()
        ]
        self.starts[key] = states[0]
        for state, row in zip(states, arguments.table.tolist(), strict=True):
            for byte, target in enumerate(row):
                if target >= 0:
                    self.rows[state][byte] = states[target]
        return states[0]

    def build_dfa(self, *, single: bool) -> Dfa:
        """Return the automaton, without further calls after the first if `single`."""
        end = self.add_text(self.after_arguments, self.form.end)
        if self.form.between is not None and not single:
            last = self.add_text(self.after_arguments, self.form.between[:-1])
            self.rows[last][ord(self.form.between[-1])] = self.before_name
        table = np.full((len(self.rows), 256), -1, dtype=np.int32)
        for state, row in enumerate(self.rows):
            table[state, list(row)] = list(row.values())
        return Dfa(table, np.arange(len(table)) == end)


def calls_dfa(form: CallFormat, functions: Mapping[str, Dfa], *, single: bool) -> Dfa:
    """Return the automaton of calls of functions, by the automata of their arguments."""
    builder = CallBuilder(form)
    for name, arguments in functions.items():
        builder.add_function(name, arguments)
    return builder.build_dfa(single=single)
