"""Prompts to token ids, and token ids back to text as they are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from reprlib import repr as brief
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.api.chat_template import ChatTemplate
from outpace.api.codec import SharedTokenizer, overlap_length, validate_text
from outpace.api.markers import Message as Message
from outpace.api.parts import PLAIN_FORMAT, AnswerFormat
from outpace.api.prompts import Prompt as Prompt
from outpace.api.prompts import validate_prompt
from outpace.api.tools import ToolUse
from outpace.constraint.calls import CallFormat
from outpace.constraint.thoughts import ThoughtFormat
from outpace.errors import OptionError

MAX_MARK_TOKENS = 16
"""Tokens at the end of a prompt that may begin or end thoughts."""

REPLACEMENT_CHARACTER = "\ufffd"
"""Replaces bytes that are not, or not yet, a character."""


class TextCodec:
    """Tokenizer of a model; rejects text if the model has no tokenizer.

    Attributes:
        silent_ids: Ids of special tokens, which have no text.
    """

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self.name = name
        self.tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self.codec = None if tokenizer is None else SharedTokenizer(name, tokenizer)
        self.chat_template = None if self.codec is None else ChatTemplate(self.codec)
        self.silent_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int | None:
        """Number of tokens of the tokenizer; None if there is no tokenizer."""
        return None if self.tokenizer is None else len(self.tokenizer)

    @property
    def eos(self) -> frozenset[int]:
        """End-of-sequence ids of the tokenizer, which may differ from the model's."""
        if self.tokenizer is None or self.tokenizer.eos_token_id is None:
            return frozenset()
        return frozenset((self.tokenizer.eos_token_id,))

    def encode(
        self,
        prompt: Prompt | None,
        *,
        raw: bool = False,
        template: Mapping[str, Any] | None = None,
        tools: ToolUse | None = None,
        effort: str | None = None,
    ) -> list[int]:
        """Encode a prompt.

        Special tokens in a user's text are encoded as plain text.

        Args:
            prompt: Text, token ids or chat messages.
            raw: Whether text is continued as it is; by default it is a user message.
            template: Variables of the chat template.
            tools: Tools that the answer may call.
            effort: Effort of reasoning, see `Options`.

        Raises:
            OptionError: For an invalid or empty prompt, a malformed message, text that is not UTF-8
                or has no tokenizer, an unknown variable, and if the template fails.
        """
        prompt, template = validate_prompt(prompt), dict(template or {})
        if unknown := [name for name in template if name not in self.template_variables]:
            names = ", ".join(sorted(self.template_variables)) or "none"
            raise OptionError(
                f"template.{unknown[0]}",
                template[unknown[0]],
                f"template.{unknown[0]}: the chat template of {self.name} has no variable "
                f"{unknown[0]!r}; its variables: {names}",
            )
        if isinstance(prompt, list) and not isinstance(prompt[0], dict):
            return prompt
        if self.tokenizer is None:
            message = f"prompt: {self.name} has no tokenizer: give the prompt as token ids"
            raise OptionError("prompt", prompt, message)
        if tools is not None:
            if raw and isinstance(prompt, str):
                raise OptionError("tools", None, "tools cannot be combined with raw: omit one")
            template |= self.required_template.tool_variables(tools.tools, tools.choice)
        if effort is not None:
            if raw and isinstance(prompt, str):
                message = "reasoning_effort cannot be combined with raw: omit one"
                raise OptionError("reasoning_effort", effort, message)
            template = self.required_template.effort_variables(effort) | template
        if isinstance(prompt, list):
            return self.encode_chat(prompt, template)
        if raw or self.tokenizer.chat_template is None:
            return self.encode_plain(prompt, begin=True)
        return self.encode_chat([{"role": "user", "content": prompt}], template)

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables of the chat template."""
        return frozenset() if self.chat_template is None else self.chat_template.variables

    def set_context_length(self, context: int) -> None:
        """Refuse text that cannot fit into `context` tokens before it is tokenized."""
        if self.codec is not None:
            self.codec.context_length = context

    def encode_plain(self, text: str, *, begin: bool = False) -> list[int]:
        """Encode text without special tokens; `begin` adds those that every text begins with."""
        assert self.codec is not None
        return self.codec.encode_plain(text, begin=begin)

    def encode_chat(self, messages: Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        """Encode a conversation with the chat template."""
        return self.required_template.encode(messages, template)

    def render_chat(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Render a conversation with the chat template, up to the beginning of the answer."""
        return self.required_template.render(messages, template)

    @property
    def required_template(self) -> ChatTemplate:
        """The chat template; raises `OptionError` if there is none."""
        assert self.chat_template is not None and self.tokenizer is not None
        if self.tokenizer.chat_template is None:
            message = f"messages: {self.name} has no chat template: give text or token ids"
            raise OptionError("messages", None, message)
        return self.chat_template

    @cached_property
    def call_format(self) -> CallFormat | None:
        """Format in which the model calls tools, or None."""
        return None if self.chat_template is None else self.chat_template.call_format

    @cached_property
    def thought_format(self) -> ThoughtFormat | None:
        """Format in which the model thinks, or None."""
        return None if self.chat_template is None else self.chat_template.thought_format

    def find_answer_format(
        self, prompt: Sequence[int], tools: ToolUse | None, *, raw: bool
    ) -> AnswerFormat:
        """Return the format of the answer to a prompt, which is text only if it is `raw`."""
        if raw:
            return PLAIN_FORMAT
        thoughts = self.thought_format
        if thoughts is not None:
            tail = self.decode(prompt[-MAX_MARK_TOKENS:], special=True)
            thoughts = thoughts.after_prompt(tail)
        return AnswerFormat(
            thoughts, None if tools is None else tools.call_format(self.call_format)
        )

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode token ids, without special tokens unless `special`.

        Returns an empty string if there is no tokenizer.
        """
        return "" if self.codec is None or not ids else self.codec.decode(ids, special=special)

    def check_same_tokens(self, other: TextCodec, ours: int, theirs: int) -> None:
        """Raise `OptionError` if two models do not share their tokens.

        Tokens at the end that only one model has, such as padding or a mask, are ignored.

        Args:
            other: Tokenizer of the other model.
            ours: Number of embeddings of this model.
            theirs: Number of embeddings of the other model.
        """
        if self.tokenizer is None or other.tokenizer is None:
            if abs(ours - theirs) > MAX_VOCAB_PADDING:
                raise OptionError(
                    "method",
                    other.name,
                    f"method: {other.name} has a vocabulary of {theirs} tokens and {self.name} "
                    f"one of {ours}: they must share a tokenizer",
                )
            return
        ids = list(range(min(len(self.tokenizer), len(other.tokenizer))))
        own_tokens = self.tokenizer.convert_ids_to_tokens(ids)
        other_tokens = other.tokenizer.convert_ids_to_tokens(ids)
        if own_tokens != other_tokens:
            token = next(token for token in ids if own_tokens[token] != other_tokens[token])
            raise OptionError(
                "method",
                other.name,
                f"method: {other.name} has a different tokenizer than {self.name}: token {token} "
                f"is {other_tokens[token]!r} there and {own_tokens[token]!r} here",
            )


MAX_VOCAB_PADDING = 512
"""Maximum difference in rows of published embeddings for one tokenizer."""


CONTEXT_TOKENS = 4
"""Tokens that are decoded again: decoders treat the first token of a string differently."""

MAX_UNFINISHED_TOKENS = 3
"""Maximum number of bytes, and so of tokens, that complete a character."""


class Detokenizer:
    """Decodes a growing list of tokens in whole characters, and cuts the text at a stop string.

    Args:
        text: Tokenizer of the model.
        stop: Stop string or strings.
        min_tokens: Stop strings that begin within this many tokens have no effect.
        form: Format of the answer, whose special tokens are text.
    """

    def __init__(
        self,
        text: TextCodec,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
        form: AnswerFormat = PLAIN_FORMAT,
    ) -> None:
        self.codec, self.format = text, form
        shown = {} if text.tokenizer is None else form.special_tokens(text.tokenizer)
        # Special tokens that are not shown are left out before decoding.
        self.decode = partial(text.decode, special=True) if shown else text.decode
        self.silent_ids = text.silent_ids - shown.keys()
        self.stop = parse_stop_strings(stop)
        if self.stop and text.tokenizer is None:
            message = f"stop needs a tokenizer, which {text.name} does not have"
            raise OptionError("stop", stop, message)
        self.ids: list[int] = []
        self.text = ""
        self.stop_string: str | None = None  # the one that ended the text
        self.num_sent = 0
        self.visible_ids: list[int] = []  # tokens with text
        self.num_decoded = 0  # how many of them are decoded into `text`
        self.min_tokens = min_tokens
        self.num_early = 0  # how many of them are among the first `min_tokens` tokens
        self.stop_begin = 0  # first position at which a stop string may begin

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.stop_string is not None

    def push_tokens(self, ids: Sequence[int]) -> bool:
        """Append new tokens; returns True once a stop string is complete."""
        for token in ids:
            if self.stopped:
                break
            self.ids.append(token)
            if token not in self.silent_ids:
                self.visible_ids.append(token)
                self.num_early += len(self.ids) <= self.min_tokens
                if self.stop:  # otherwise decoded on demand
                    self.decode_new()
        return self.stopped

    def decode_new(self, *, final: bool = False) -> None:
        """Decode new tokens that later tokens cannot change, or all of them if `final`."""
        window = self.visible_ids[max(self.num_decoded - CONTEXT_TOKENS, 0) :]
        first = len(self.visible_ids) - len(window)
        before, whole = self.decode(window[: self.num_decoded - first]), self.decode(window)
        for end in range(len(self.visible_ids), self.num_decoded, -1):
            after = whole if end == len(self.visible_ids) else self.decode(window[: end - first])
            # Only `MAX_UNFINISHED_TOKENS` tokens can complete a character. If more follow and the
            # text is unchanged, the character stays incomplete.
            late = len(self.visible_ids) - end >= MAX_UNFINISHED_TOKENS and whole.startswith(after)
            if final or late or not after.endswith(REPLACEMENT_CHARACTER):
                early, self.num_decoded = self.num_decoded < self.num_early, end
                self.append_text(after[len(before) :], early)
                break

    def append_text(self, piece: str, early: bool) -> None:
        """Append new text, and cut it at a stop string that it completes.

        Args:
            piece: The text.
            early: Whether it belongs to the first `min_tokens` tokens, in which no stop string
                begins.
        """
        begin, self.text = len(self.text), self.text + piece
        if early:
            self.stop_begin = len(self.text)
        places = {
            mark: self.text.find(mark, max(begin - len(mark) + 1, self.stop_begin))
            for mark in self.stop
        }
        if ends := [(at, mark) for mark, at in places.items() if at >= 0]:
            at, self.stop_string = min(ends)
            self.text = self.text[:at]

    def take_text(self, *, final: bool = False) -> str:
        """Return the text since the last call; a possible start of a stop string is held back."""
        if not self.stopped and self.num_decoded < len(self.visible_ids):
            self.decode_new(final=final)
        end = len(self.text)
        if not (final or self.stopped):
            late = self.text[self.stop_begin :]
            end -= max((overlap_length(late, mark) for mark in self.stop), default=0)
        piece, self.num_sent = self.text[self.num_sent : end], max(end, self.num_sent)
        return piece


def parse_stop_strings(stop: Any) -> tuple[str, ...]:
    """Return the stop strings as a tuple; raises `OptionError` for an invalid or empty one."""
    marks = [stop] if isinstance(stop, str) else stop
    listed = isinstance(marks, Sequence) and not isinstance(marks, bytes | bytearray)
    if not listed or not all(isinstance(mark, str) for mark in marks):
        message = f"stop must be a string or a list of strings, got {brief(stop)}"
        raise OptionError("stop", stop, message)
    if "" in marks:
        raise OptionError("stop", stop, "stop must not contain an empty string")
    return tuple(validate_text("stop", mark) for mark in marks)
