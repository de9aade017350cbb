"""Prompts to token ids, and token ids back to text as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any

from numpy import integer, ndarray
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.api.chat_template import ChatTemplate
from outpace.api.codec import Codec
from outpace.api.codec import checked_text as checked_text
from outpace.api.markers import Message as Message
from outpace.errors import OptionError

Prompt = str | Sequence[int] | Sequence[Message] | ndarray | Tensor

UNKNOWN = "\ufffd"
"""What bytes become that are no character, or not yet one."""


class Text:
    """What a model's tokenizer can say; refuses text clearly where there is no tokenizer."""

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self.name = name
        self.tokenizer = tokenizer
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self.codec = None if tokenizer is None else Codec(name, tokenizer)
        self.chat_template = None if self.codec is None else ChatTemplate(self.codec)
        self.silent = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def size(self) -> int | None:
        """Number of tokens that have a meaning; None where nobody knows."""
        return None if self.tokenizer is None else len(self.tokenizer)

    @property
    def eos(self) -> frozenset[int]:
        """End-of-sequence of the tokenizer, which may be another than the model's."""
        if self.tokenizer is None or self.tokenizer.eos_token_id is None:
            return frozenset()
        return frozenset((self.tokenizer.eos_token_id,))

    def encode(
        self, prompt: Prompt | None, *, raw: bool = False, template: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a prompt; a string is a user's message unless `raw`.

        Special tokens that stand in the text of a user are encoded as plain text. `template` are
        variables of the chat template. Raises `ValueError` for what is no prompt or empty, a
        malformed message, text that is no UTF-8 or without a tokenizer, a variable that the
        template does not have, and where the template fails.
        """
        prompt, template = checked_prompt(prompt), template or {}
        if unknown := [name for name in template if name not in self.variables]:
            known = ", ".join(sorted(self.variables)) or "none"
            raise OptionError(
                f"template.{unknown[0]}",
                template[unknown[0]],
                f"template.{unknown[0]}: the chat template of {self.name} has no variable "
                f"{unknown[0]!r}; it has {known}",
            )
        if isinstance(prompt, list) and not isinstance(prompt[0], dict):
            return prompt
        if self.tokenizer is None:
            message = f"prompt: {self.name} has no tokenizer: give the prompt as token ids"
            raise OptionError("prompt", prompt, message)
        if isinstance(prompt, list):
            return self.chat(prompt, template)
        if raw or self.tokenizer.chat_template is None:
            return self.plain(prompt, begin=True)
        return self.chat([{"role": "user", "content": prompt}], template)

    @property
    def variables(self) -> frozenset[str]:
        """Names that the chat template leaves to whoever renders it."""
        return frozenset() if self.chat_template is None else self.chat_template.variables

    def limit(self, context: int) -> None:
        """Refuse text that cannot fit into so many tokens before it is tokenized."""
        if self.codec is not None:
            self.codec.context = context

    def plain(self, text: str, *, begin: bool = False) -> list[int]:
        """Token ids of text in which nothing is special, behind the model's usual beginning."""
        assert self.codec is not None
        return self.codec.plain(text, begin=begin)

    def chat(self, messages: Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        return self.templated.encode(messages, template)

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """A conversation as the text of the chat template, ready for the answer."""
        return self.templated.render(messages, template)

    @property
    def templated(self) -> ChatTemplate:
        """The chat template; `OptionError` where there is none."""
        assert self.chat_template is not None and self.tokenizer is not None
        if self.tokenizer.chat_template is None:
            message = f"messages: {self.name} has no chat template: give text or token ids"
            raise OptionError("messages", None, message)
        return self.chat_template

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens; empty where there is no tokenizer."""
        return "" if self.codec is None or not ids else self.codec.decode(ids)

    def agrees(self, other: Text, ours: int, theirs: int) -> None:
        """Raise `OptionError` where two models do not share their tokens.

        `ours` and `theirs` are the sizes of the embeddings. Tokens that only one of them has at
        the end (padding, a mask) are fine.
        """
        if self.tokenizer is None or other.tokenizer is None:
            if abs(ours - theirs) > PADDING:
                raise OptionError(
                    "method",
                    other.name,
                    f"method: {other.name} has a vocabulary of {theirs} tokens and {self.name} "
                    f"one of {ours}: they must share a tokenizer",
                )
            return
        ids = list(range(min(len(self.tokenizer), len(other.tokenizer))))
        mine = self.tokenizer.convert_ids_to_tokens(ids)
        its = other.tokenizer.convert_ids_to_tokens(ids)
        if mine != its:
            token = next(token for token in ids if mine[token] != its[token])
            raise OptionError(
                "method",
                other.name,
                f"method: {other.name} has another tokenizer than {self.name}: {its[token]!r} is "
                f"token {token} there and {mine[token]!r} here",
            )


PADDING = 512
"""Rows by which published embeddings of one tokenizer may differ in size."""


def checked_prompt(prompt: Any) -> str | list[Any]:
    """A prompt as text, token ids or messages; `OptionError` for what is none of them or empty."""
    if isinstance(prompt, ndarray | Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        message = f"prompt: {brief(prompt)} is no prompt: give text, token ids or chat messages"
        raise OptionError("prompt", prompt, message)
    if not prompt:
        message = "prompt: the prompt is empty: give some text or at least one token"
        raise OptionError("prompt", prompt, message)
    if isinstance(prompt, str):
        return checked_text("prompt", prompt)
    if any(isinstance(each, dict | str) for each in prompt):
        return [checked_message(f"messages[{n}]", each) for n, each in enumerate(prompt)]
    return [token_id(n, each) for n, each in enumerate(prompt)]


def as_many(prompts: Any) -> list[Any]:
    """One prompt or many as a list of prompts; the rows of a table of token ids are many."""
    if isinstance(prompts, ndarray | Tensor):
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return [prompts]
    many = not prompts or isinstance(prompts[0], Sequence | ndarray | Tensor)
    return list(prompts) if many else [prompts]


def token_id(place: int, token: Any) -> int:
    """A token id of a prompt as Python's integer; `OptionError` for what is none."""
    if isinstance(token, bool) or not isinstance(token, int | integer):
        param = f"prompt[{place}]"
        message = f"{param}: {brief(token)} is no token id: give whole numbers"
        raise OptionError(param, token, message)
    return int(token)


def checked_message(param: str, message: Any) -> Message:
    """The chat message of `param`, parts of text joined.

    Raises `OptionError` where role or content is no text.
    """
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        parts = (
            part_text(f"{param}.content[{n}]", part) for n, part in enumerate(message["content"])
        )
        message = {**message, "content": "".join(parts)}
    what = f"{brief(message)} is no chat message: give {{'role': …, 'content': text}}"
    if not isinstance(message, dict):
        raise OptionError(param, message, f"{param}: {what}")
    for key in ("role", "content"):
        own, text = f"{param}.{key}", message.get(key)
        if not isinstance(text, str):
            raise OptionError(own, text, f"{own}: {what}")
        checked_text(own, text)
    return message


def part_text(param: str, part: Any) -> str:
    """Text of a part of a message, as OpenAI's clients write them; `OptionError` for another."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    message = f"{param}: {brief(part)} is no chat message's text"
    raise OptionError(param, part, f"{message}: give {{'type': 'text', 'text': …}}")


CONTEXT = 4
"""Tokens that are decoded once more, since decoders treat the first of a text differently."""

UNFINISHED = 3
"""Bytes, and so tokens, that a character may still wait to be finished by."""


class Detokenizer:
    """Text of a growing list of tokens, whole characters at a time, cut at a stop string.

    A stop string that begins within the first `min_tokens` tokens does not count.
    """

    def __init__(self, text: Text, stop: str | Sequence[str] = (), min_tokens: int = 0) -> None:
        self.speech = text
        self.decode = text.decode
        self.silent = text.silent
        self.stop = stop_strings(stop)
        if self.stop and text.tokenizer is None:
            message = f"stop: {text.name} has no tokenizer: stop strings need one"
            raise OptionError("stop", stop, message)
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self.sent = 0
        self.spoken: list[int] = []  # tokens that have text
        self.done = 0  # how many of them are in the text
        self.min_tokens = min_tokens
        self.early = 0  # how many of them are among the first `min_tokens` tokens
        self.begin = 0  # where stop strings may begin

    def push(self, ids: Sequence[int]) -> bool:
        """Take new tokens; True once a stop string has come."""
        for token in ids:
            if self.stopped:
                break
            self.ids.append(token)
            if token not in self.silent:
                self.spoken.append(token)
                self.early += len(self.ids) <= self.min_tokens
                if self.stop:  # otherwise decoded when asked for
                    self.extend()
        return self.stopped

    def extend(self, *, final: bool = False) -> None:
        """Decode what is new, as far as no later token can change it; all of it if `final`."""
        window = self.spoken[max(self.done - CONTEXT, 0) :]
        first = len(self.spoken) - len(window)
        before, whole = self.decode(window[: self.done - first]), self.decode(window)
        for end in range(len(self.spoken), self.done, -1):
            after = whole if end == len(self.spoken) else self.decode(window[: end - first])
            # Behind what ends in an unfinished character, only so few tokens can belong to it;
            # where they do, what they finish is another text.
            late = len(self.spoken) - end >= UNFINISHED and whole.startswith(after)
            if final or late or not after.endswith(UNKNOWN):
                early, self.done = self.done < self.early, end
                self.append(after[len(before) :], early)
                break

    def append(self, piece: str, early: bool) -> None:
        """Take new text, and cut it at a stop string that it completes.

        In text of the first `min_tokens` tokens, which is `early`, none can begin.
        """
        begin, self.text = len(self.text), self.text + piece
        if early:
            self.begin = len(self.text)
        found = (self.text.find(mark, max(begin - len(mark) + 1, self.begin)) for mark in self.stop)
        if ends := [at for at in found if at >= 0]:
            self.text, self.stopped = self.text[: min(ends)], True

    def take(self, *, final: bool = False) -> str:
        """Text since the last call, held back where it may be the beginning of a stop string."""
        if not self.stopped and self.done < len(self.spoken):
            self.extend(final=final)
        end = len(self.text)
        if not (final or self.stopped):
            late = self.text[self.begin :]
            end -= max((overlap(late, mark) for mark in self.stop), default=0)
        piece, self.sent = self.text[self.sent : end], max(end, self.sent)
        return piece


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One stop string or several; `OptionError` for what is none, or an empty one."""
    marks = [stop] if isinstance(stop, str) else stop
    listed = isinstance(marks, Sequence) and not isinstance(marks, bytes | bytearray)
    if not listed or not all(isinstance(mark, str) for mark in marks):
        message = f"stop must be a string or a list of strings, not {brief(stop)}"
        raise OptionError("stop", stop, message)
    if "" in marks:
        raise OptionError("stop", stop, "stop: a stop string is empty")
    return tuple(checked_text("stop", mark) for mark in marks)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
