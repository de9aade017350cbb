"""Formats in which models write calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.constraint.vocabulary import special_tokens_in


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls: `begin name middle arguments (between name middle arguments)* end`.

    The arguments are a JSON object. An answer without a call is `preface text`.

    Attributes:
        name: Name of the format.
        marker: First characters of `begin`. A text with them is a call.
        begin: Text before the name of the first function.
        middle: Text between a name and its arguments.
        between: Text between the arguments and the name of the next function; None if an answer has
            one call.
        end: Text after the last arguments.
        preface: Text that begins an answer without a call.
        leads: Whether a call can only be the beginning of an answer.
        required: Texts that a chat template of this format contains.
        foreign: Texts of chat templates whose calls are similar, but not of this format.
        variants: Formats that models of such templates write at the beginning of an answer instead.
            There, only the name of a declared function makes a text a call.
        names: Declared functions, if calls may be of a variant.
    """

    name: str = "variant"
    marker: str = ""
    begin: str
    middle: str
    between: str | None = None
    end: str
    preface: str = ""
    leads: bool = False
    required: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    variants: tuple[CallFormat, ...] = ()
    names: tuple[str, ...] = ()

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
    CallFormat(
        name="object",
        marker='{"name"',
        begin='{"name": "',
        middle='", "parameters": ',
        end="}",
        leads=True,
        required=('{"name": function name, "parameters": dictionary',),
        variants=fenced_calls("parameters"),
    ),
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
)
"""Formats of Hermes, Qwen and SmolLM3; of Mistral up to Small 3.1, and after Small 3.2; of Llama
3.1 and 3.2, and of Gemma 3 as Google's guide to function calling asks for JSON; of gpt-oss, whose
calls end with the end-of-sequence token `<|call|>`."""

TOOL_VARIABLES = ("tools", "xml_tools")
"""Variables by which chat templates receive tools, the usual one first."""


def find_call_format(templates: Any) -> CallFormat | None:
    """Return the format of the calls that a tokenizer's chat template describes, or None.

    Args:
        templates: None, a template, or templates by name.
    """
    sources = templates.values() if isinstance(templates, Mapping) else [templates or ""]
    text = "\0".join(sources).replace('\\"', '"')
    return next(
        (
            each
            for each in CALL_FORMATS
            if all(mark in text for mark in each.required)
            and not any(mark in text for mark in each.foreign)
        ),
        None,
    )
