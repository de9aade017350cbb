"""Token ids to text as they are generated, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from reprlib import repr as brief
from typing import Any

from outpace.api.codec import overlap_length, validate_text
from outpace.api.parts import PLAIN_FORMAT, AnswerFormat, AnswerParser
from outpace.api.text import TextCodec
from outpace.errors import OptionError

REPLACEMENT_CHARACTER = "\ufffd"
"""Replaces bytes that are not, or not yet, a character."""

CONTEXT_TOKENS = 4
"""Tokens that are decoded again: decoders treat the first token of a string differently."""

MAX_UNFINISHED_TOKENS = 3
"""Maximum number of bytes, and so of tokens, that complete a character."""


class Detokenizer:
    """Decodes a growing list of tokens in whole characters, and cuts the text at a stop string.

    A call of a tool is never cut: stop strings apply up to the text that begins it.

    Args:
        text: Tokenizer of the model.
        stop: Stop string or strings.
        min_tokens: Stop strings that begin within this many tokens have no effect.
        form: Format of the answer, whose special tokens are text.
        padding: Tokens without text.

    Attributes:
        stop_tokens: Stop strings that are tokens without text, by their ids, which end the answer.
    """

    def __init__(
        self,
        text: TextCodec,
        stop: str | Sequence[str] = (),
        min_tokens: int = 0,
        form: AnswerFormat = PLAIN_FORMAT,
        padding: Set[int] = frozenset(),
    ) -> None:
        self.codec, self.format = text, form
        shown = {} if text.tokenizer is None else form.special_tokens(text.tokenizer)
        # Special tokens that are not shown are left out before decoding.
        self.decode = partial(text.decode, special=True) if shown else text.decode
        self.silent_ids = text.silent_ids - shown.keys() | padding
        self.stop, self.stop_tokens = self.split_stop_strings(stop)
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
        self.call_begin: int | None = None  # position after the text that begins a call
        self.parser = AnswerParser(form) if self.stop and form.calls is not None else None

    def split_stop_strings(self, stop: Any) -> tuple[list[str], dict[int, str]]:
        """Return the stop strings with text, and by id those that are tokens without text.

        Raises:
            OptionError: For an invalid string, and for a token without text among text.
        """
        marks, silent = parse_stop_strings(stop), self.codec.special_ids
        strings = [mark for mark in marks if silent.get(mark) not in self.silent_ids]
        for mark in strings:
            for name, token in silent.items():
                if token in self.silent_ids and name in mark:
                    message = (
                        f"stop: {brief(mark)} has the special token {name} among text, which is "
                        "no text in answers: give the token alone"
                    )
                    raise OptionError("stop", mark, message)
        return strings, {silent[mark]: mark for mark in marks if mark not in strings}

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
        self.find_call(piece)
        places = {
            mark: self.text.find(mark, max(begin - len(mark) + 1, self.stop_begin), self.call_begin)
            for mark in self.stop
        }
        if ends := [(at, mark) for mark, at in places.items() if at >= 0]:
            at, self.stop_string = min(ends)
            self.text = self.text[:at]

    def find_call(self, piece: str) -> None:
        """Find out where new text begins a call, if it does."""
        if self.parser is None or self.call_begin is not None:
            return
        for position, character in enumerate(piece, len(self.text) - len(piece) + 1):
            self.parser.feed(character)
            if self.parser.has_call:
                self.call_begin = position
                return

    def take_text(self, *, final: bool = False) -> str:
        """Return the text since the last call; a possible start of a stop string is held back."""
        if not self.stopped and self.num_decoded < len(self.visible_ids):
            self.decode_new(final=final)
        end = len(self.text)
        if not (final or self.stopped or self.call_begin is not None):
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
