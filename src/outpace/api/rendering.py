"""Rendering of chat templates, in the Jinja environment for which they are published."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from outpace.api.template_limits import Budget, LimitedContext, LimitedEnvironment
from outpace.errors import OptionError
from outpace.tokenizer import Tokenizer

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of messages that hold thoughts; templates read the first or the second."""


class GenerationTags(Extension):
    """The tags `generation`, which mark answers for training and are not part of Jinja."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content of the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateNamespace(Namespace):
    """A namespace without the names by which templates could leave the sandbox."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        for name in (given := dict(*args, **attributes)):
            check_attribute(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Omit the values, which may contain one another many times."""
        return "<Namespace>"


def check_attribute(name: object) -> None:
    """Raise `SecurityError` for the name of a private attribute."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have the attribute {name!r}")


class TemplateDict:
    """The function `dict` without the attributes of the type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        """Build a dict."""
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Build a dict of equal values."""
        return dict.fromkeys(*args)


def raise_exception(message: str) -> NoReturn:
    """Fail, as a template does that rejects a conversation."""
    raise TemplateError(message)


def write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def format_now(form: str) -> str:
    """Format the local time."""
    if len(form) > MAX_TIME_FORMAT:
        raise TemplateError(
            f"the format of strftime_now has more than {MAX_TIME_FORMAT} characters"
        )
    return datetime.now().strftime(form)


MAX_TIME_FORMAT = 256
"""Maximum length of a format of time, since some platforms pad a field to any width."""


@cache
def template_environment() -> LimitedEnvironment:
    """Return the environment of chat templates, which are untrusted code."""
    return LimitedEnvironment(
        filters={"tojson": write_json},
        functions={
            "raise_exception": raise_exception,
            "strftime_now": format_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        },
        extensions=[GenerationTags, LoopControlExtension],
    )


@contextmanager
def template_errors() -> Iterator[None]:
    """Raise every error of a template, a program that may raise anything, as `TemplateError`."""
    try:
        yield
    except RecursionError as error:
        raise TemplateError("it is nested too deep, or calls itself too often") from error
    except MemoryError as error:
        raise TemplateError("it needs more memory than there is") from error
    except Exception as error:
        raise TemplateError(str(error)[:MAX_REASON] or type(error).__name__) from error


MAX_REASON = 1000
"""Maximum length of the reason of a failure, which a template may write itself."""


def parse_template(source: str) -> nodes.Template:
    """Return the syntax tree of a template; raises `TemplateError` if it has none."""
    with template_errors():
        return template_environment().parse(source)


@lru_cache
def compile_template(source: str) -> Template:
    """Compile a template once."""
    return template_environment().from_string(source)


def find_template(tokenizer: Tokenizer, *, with_tools: bool) -> str:
    """Return the chat template of a tokenizer; `ValueError` if it has several and no default."""
    source = tokenizer.chat_template
    if isinstance(source, dict):
        names = ("tool_use", "default") if with_tools else ("default",)
        source = next((source[name] for name in names if name in source), None)
    if source is None:
        raise ValueError("there is no default template")
    return source


def render_template(
    source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render a conversation with a chat template, up to the next answer.

    Raises:
        TemplateError: If the template fails, or takes too many steps or characters.
        OptionError: If a message or variable is nested too deep.
    """
    values = {"tools": None, "documents": None, "add_generation_prompt": True}
    shown = [
        alias_thoughts(plain_value(message, f"messages[{number}]"))
        for number, message in enumerate(messages)
    ]
    values |= {name: plain_value(each, f"template.{name}") for name, each in variables.items()}
    with template_errors():
        template = compile_template(source)
        context = template.new_context({"messages": shown, **values})
        assert isinstance(context, LimitedContext)
        context.budget = Budget([shown, values], len(shown))
        return "".join(template.root_render_func(context))


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **variables: Any
) -> str:
    """Render a conversation with the chat template of a tokenizer, as `render_template` does."""
    source = find_template(tokenizer, with_tools=variables.get("tools") is not None)
    return render_template(source, messages, {**tokenizer.special_tokens_map, **variables})


def alias_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without missing fields, with its thoughts in the fields of all templates."""
    message = {name: value for name, value in message.items() if value is not None}
    thoughts = next((message[name] for name in THOUGHT_FIELDS if name in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


MAX_VALUE_DEPTH = 128
"""Maximum nesting of a message or variable, above that of arguments and schemas (100)."""


def plain_value(value: Any, name: str, depth: int = 0) -> Any:
    """Rebuild a value from JSON types, since templates may call the methods of others.

    Raises:
        OptionError: If it is nested too deep.
    """
    kind = type(value)
    if kind is str or value is None or kind is bool:
        return value
    if depth > MAX_VALUE_DEPTH:
        raise OptionError(name, None, f"must not be nested more than {MAX_VALUE_DEPTH} deep")
    match value:
        case str():
            return str.__str__(value)
        case Mapping():
            return {
                each if type(each) is str else plain_value(each, name, depth + 1): (
                    found if type(found) is str else plain_value(found, name, depth + 1)
                )
                for each, found in value.items()
            }
        case list():
            return [plain_value(each, name, depth + 1) for each in value]
        case tuple():
            return tuple(plain_value(each, name, depth + 1) for each in value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case np.generic():
            return plain_value(value.item(), name, depth)
    return f"<{kind.__name__}>"
