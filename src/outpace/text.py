"""Prompts to token ids, and token ids back to text as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class Text:
    """What a model's tokenizer can say; refuses text clearly where there is no tokenizer."""

    def __init__(self, name: str, tokenizer: Tokenizer | None) -> None:
        self.name = name
        self.tokenizer = tokenizer

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt; a string is a user's message unless `raw`.

        Special tokens that stand in the text of a user are encoded as plain text. Raises
        `ValueError` for an empty prompt, a malformed message, or text without a tokenizer.
        """
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            if not prompt:
                raise ValueError("the prompt is empty: give at least one token")
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: give the prompt as token ids")
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: give some text")
            if raw or self.tokenizer.chat_template is None:
                return self.plain(prompt, begin=True)
            return self.chat([{"role": "user", "content": prompt}])
        return self.chat(prompt)

    def plain(self, text: str, *, begin: bool = False) -> list[int]:
        """Token ids of text in which nothing is special, behind the model's usual beginning."""
        assert self.tokenizer is not None
        ids: list[int] = self.tokenizer(
            text, add_special_tokens=begin, split_special_tokens=True
        ).input_ids
        return ids

    def chat(self, messages: Sequence[Any]) -> list[int]:
        """Token ids of a conversation under the model's chat template."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        for message in messages:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise ValueError(
                    f"{message!r} is no chat message: give {{'role': …, 'content': text}}"
                )
        if tokenizer.chat_template is None:
            raise ValueError(f"{self.name} has no chat template: give text or token ids")
        special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        if marked := [m["role"] for m in messages if any(mark in m["role"] for mark in special)]:
            raise ValueError(f"{marked[0]!r} is no role: it holds a special token")
        if not any(mark in message["content"] for message in messages for mark in special):
            text = self.render(messages)
            return tokenizer(text, add_special_tokens=False).input_ids
        # Contents are cut out of the rendered template, so that only its own marks are special.
        stand_ins = [f"\u27ea{index}\u27eb" for index in range(len(messages))]
        rest = self.render([{**m, "content": s} for m, s in zip(messages, stand_ins, strict=True)])
        ids: list[int] = []
        for stand_in, message in zip(stand_ins, messages, strict=True):
            if stand_in not in rest:
                continue  # a template may leave messages out
            before, _, rest = rest.partition(stand_in)
            ids += tokenizer(before, add_special_tokens=False).input_ids
            ids += self.plain(message["content"])
        ids += tokenizer(rest, add_special_tokens=False).input_ids
        return ids

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as the text of the chat template, ready for the answer."""
        assert self.tokenizer is not None
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens; empty where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def agrees(self, other: Text, ours: int, theirs: int) -> None:
        """Raise `ValueError` where two models do not share their tokens.

        `ours` and `theirs` are the sizes of the embeddings. Tokens that only one of them has at
        the end (padding, a mask) are fine.
        """
        if self.tokenizer is None or other.tokenizer is None:
            if abs(ours - theirs) > PADDING:
                raise ValueError(
                    f"{other.name} has a vocabulary of {theirs} tokens and {self.name} one of "
                    f"{ours}: they must share a tokenizer"
                )
            return
        size = min(len(self.tokenizer), len(other.tokenizer))
        mine, its = (
            {token: index for token, index in tokenizer.get_vocab().items() if index < size}
            for tokenizer in (self.tokenizer, other.tokenizer)
        )
        if mine != its:
            token = next(token for token in mine if mine[token] != its.get(token))
            raise ValueError(
                f"{other.name} has another tokenizer than {self.name}: {token!r} is token "
                f"{mine[token]} here and {its.get(token, 'none')} there"
            )


PADDING = 512
"""Rows by which published embeddings of one tokenizer may differ in size."""


class Detokenizer:
    """Text of a growing list of tokens, whole characters at a time, cut at a stop string."""

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty")
        if stop and text.tokenizer is None:
            raise ValueError(f"{text.name} has no tokenizer: stop strings need one")
        self.decode = text.decode
        self.stop = stop
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self.sent = 0
        self.done = 0  # tokens whose text is whole and known
        self.known = ""  # text of those tokens

    def push(self, ids: Sequence[int]) -> bool:
        """Take new tokens; True once a stop string has come."""
        if not self.stop:
            self.ids += ids  # decoded when asked for
            return False
        for token in ids:
            if self.stopped:
                break
            self.ids.append(token)
            self.extend()
            found = [at for mark in self.stop if (at := self.text.find(mark)) >= 0]
            if found:
                self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def extend(self) -> None:
        """Decode the last tokens again; a character may end only with the next one."""
        first, end = max(self.done - 4, 0), len(self.ids)
        before = self.decode(self.ids[first : self.done])
        while end > self.done:
            after = self.decode(self.ids[first:end])
            if not after.endswith("\ufffd"):
                self.known += after[len(before) :]
                self.done = end
                break
            end -= 1
        self.text = self.known

    def take(self, *, final: bool = False) -> str:
        """Text since the last call, held back where it may be the beginning of a stop string."""
        if not self.stop:
            self.extend()
        if final and not self.stopped and self.done < len(self.ids):
            self.text = self.known + self.decode(self.ids[self.done :])
        end = len(self.text)
        if not (final or self.stopped):
            end -= max((overlap(self.text, mark) for mark in self.stop), default=0)
        piece, self.sent = self.text[self.sent : end], max(end, self.sent)
        return piece


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
