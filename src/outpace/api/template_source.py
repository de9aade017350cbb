"""What a chat template contains: its variables, and the forms of messages that it expects."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.ext import LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Call, Const, Getattr, Template
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.api.markers import Message
from outpace.constraint.calls import TOOL_VARIABLES, CallFormat, find_call_format
from outpace.constraint.thoughts import ThoughtFormat, find_thought_format
from outpace.errors import OptionError

RESERVED_NAMES = {"messages", "add_generation_prompt", "documents", "raise_exception"} | {
    *TOOL_VARIABLES,
    "strftime_now",
    "continue_final_message",
    "chat_template",
    "tokenize",
}
"""Names in a chat template that are not variables of a request."""

REASONING_FIELDS = ("reasoning_content", "thinking")
"""Fields of messages by which chat templates receive thoughts, the usual one first."""


class TemplateSource:
    """Parts of a chat template, by its syntax tree."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name, self.tokenizer = name, tokenizer

    @cached_property
    def syntax_trees(self) -> list[Template]:
        """Syntax trees of the template, or of all templates if there are several."""
        sources = self.tokenizer.chat_template or []
        sources = sources.values() if isinstance(sources, dict) else sources
        # The `generation` tags, which training needs, are not part of Jinja.
        plain = [
            re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)
            for source in ([sources] if isinstance(sources, str) else sources)
        ]
        try:
            return [Environment(extensions=[LoopControlExtension]).parse(each) for each in plain]
        except TemplateError as error:
            message = f"messages: the chat template of {self.name} fails: {error}"
            raise OptionError("messages", None, message) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that a request may set."""
        names = {name for tree in self.syntax_trees for name in find_undeclared_variables(tree)}
        return frozenset(name for name in names - RESERVED_NAMES if not name.endswith("_token"))

    @cached_property
    def call_format(self) -> CallFormat | None:
        """Format of the calls of tools that the template describes, or None."""
        return (
            None if self.tool_variable is None else find_call_format(self.tokenizer.chat_template)
        )

    @cached_property
    def tool_variable(self) -> str | None:
        """Variable by which the template receives tools, or None."""
        names = {name for tree in self.syntax_trees for name in find_undeclared_variables(tree)}
        return next((name for name in TOOL_VARIABLES if name in names), None)

    def tool_variables(self, tools: Sequence[Message], choice: str) -> dict[str, Any]:
        """Return the variables by which the template receives tools.

        Raises:
            OptionError: If it does not support them.
        """
        if self.tool_variable is None or self.call_format is None:
            field = "tools" if choice == "auto" else "tool_choice"
            message = (
                f"{field}: the chat template of {self.name} does not describe tools in a known "
                f"format, which tool_choice={choice!r} with tools needs; use tool_choice='none'"
            )
            raise OptionError(field, choice, message)
        return {self.tool_variable: [*tools]}

    @cached_property
    def thought_format(self) -> ThoughtFormat | None:
        """Format of the thoughts that the template describes, or None."""
        return find_thought_format(self.tokenizer.chat_template)

    @cached_property
    def reasoning_field(self) -> str | None:
        """Field of messages by which the template receives thoughts, or None."""
        return next((name for name in REASONING_FIELDS if name in self.message_fields), None)

    def effort_variables(self, effort: str) -> dict[str, Any]:
        """Return the variables by which the template receives an effort of reasoning.

        Raises:
            OptionError: If it has no such variable.
        """
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": effort}
        if "enable_thinking" in self.variables:
            return {"enable_thinking": effort != "none"}
        message = (
            f"reasoning_effort: the chat template of {self.name} has neither the variable "
            "reasoning_effort nor enable_thinking; omit it"
        )
        raise OptionError("reasoning_effort", effort, message)

    def write_message(self, number: int, message: Message) -> Message:
        """Return a message in the form that the template expects.

        Raises:
            OptionError: If the template supports neither calls nor their results.
        """
        return self.write_calls(number, self.write_thoughts(message))

    def write_thoughts(self, message: Message) -> Message:
        """Return a message with its thoughts in the template's field, or else as text.

        Without a format of thoughts, they are left out.
        """
        if "reasoning_content" not in message:
            return message
        message = {**message}
        thoughts, form = message.pop("reasoning_content"), self.thought_format
        if thoughts and self.reasoning_field is not None:
            message[self.reasoning_field] = thoughts
        elif thoughts and form is not None:
            before = f"{form.begin}\n{thoughts}\n{form.end}\n\n"
            message["content"] = before + message["content"]
        return message

    def write_calls(self, number: int, message: Message) -> Message:
        """Return a message whose calls of tools the template writes, or that has them as text.

        Raises:
            OptionError: If the template supports neither calls nor their results.
        """
        calls = message.get("tool_calls")
        if not calls and "tool_call_id" not in message:
            return message
        if "tool" not in self.string_constants or (self.call_format is None and not self.has_calls):
            field = f"messages[{number}].{'tool_calls' if calls else 'role'}"
            text = f"{field}: the chat template of {self.name} supports no calls of tools"
            raise OptionError(field, None, text)
        if not calls or self.has_calls:
            return message
        assert self.call_format is not None
        functions = [call["function"] for call in calls]
        written = self.call_format.write_calls(
            (each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions
        )
        content = "\n".join(filter(None, (message["content"], written)))
        return {"role": message["role"], "content": content}

    @property
    def has_calls(self) -> bool:
        """Whether the template writes the calls in a message."""
        return "tool_calls" in self.message_fields

    @cached_property
    def message_fields(self) -> frozenset[str]:
        """Names of attributes and other strings in the template, such as fields of messages."""
        nodes = chain.from_iterable(tree.find_all(Getattr) for tree in self.syntax_trees)
        return self.string_constants | {each.attr for each in nodes}

    @cached_property
    def string_constants(self) -> frozenset[str]:
        """Strings in the template's expressions, which it may search for in a string."""
        found = chain.from_iterable(tree.find_all(Const) for tree in self.syntax_trees)
        return frozenset(each.value for each in found if isinstance(each.value, str) and each.value)

    @cached_property
    def boundary_constants(self) -> frozenset[str]:
        """Strings that the template searches for at the beginning or end of a string."""
        calls = chain.from_iterable(tree.find_all(Call) for tree in self.syntax_trees)
        return frozenset(
            word.value
            for call in calls
            if isinstance(call.node, Getattr) and call.node.attr in ("startswith", "endswith")
            for argument in call.args
            for word in (argument, *argument.find_all(Const))
            if isinstance(word, Const) and isinstance(word.value, str)
        )
