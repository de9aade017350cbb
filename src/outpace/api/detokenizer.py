"""Token ids to text as they are generated, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from outpace.api.codec import validate_text
from outpace.api.parts import PLAIN_FORMAT, AnswerFormat, AnswerParser
from outpace.api.text import TextCodec
from outpace.checkpoints.fields import convert_panics
from outpace.errors import OptionError
from outpace.tokenizer import overlap_length

FIRST_MARKER = 0xD800
"""Code of the first character that stands for a special token: no text has surrogates."""


class Detokenizer:
    """Decodes a growing list of tokens in whole characters, and cuts the text at a stop string.

    A call of a tool is never cut: stop strings apply up to the text that begins it. The text also
    ends after a call that must be the last one, see `CallParser`.

    Args:
        text: Tokenizer of the model.
        stop: Stop string or strings.
        min_tokens: Stop strings that begin within this many tokens have no effect.
        form: Format of the answer, whose special tokens are text.
        padding: Tokens without text.

    Attributes:
        stop_tokens: Stop strings that are tokens without text, by their ids, which end the answer.
        markers: Characters that stand for the tokens without text in other stop strings.
        stop: Stop strings by their form in `marked`.
        marked: Text so far, with `markers`.
        may_stop: Whether its text may end the answer.
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
        self.decoder = text.begin_text()
        self.silent_ids = text.silent_ids - shown.keys() | padding
        self.markers: dict[int, str] = {}
        self.stop, self.stop_tokens = self.split_stop_strings(stop)
        if self.stop and text.tokenizer is None:
            raise OptionError("stop", stop, f"needs a tokenizer, which {text.name} does not have")
        self.ids: list[int] = []
        self.marked = ""
        self.has_ended = False
        self.stop_string: str | None = None  # the one that ended the text
        self.num_sent = 0
        self.min_tokens = min_tokens
        self.stop_begin = 0  # first position at which a stop string may begin
        self.call_begin: int | None = None  # position after the text that begins a call
        self.parser = AnswerParser(form)
        # With stop strings, the parts of an answer are those of text that can no longer be cut. A
        # call must be found before that, since no stop string cuts it.
        self.ahead = AnswerParser(form) if self.stop else self.parser
        self.may_stop = bool(self.stop) or form.calls is not None

    def split_stop_strings(self, stop: Any) -> tuple[dict[str, str], dict[int, str]]:
        """Return `stop` and `stop_tokens`; raises `OptionError` for an invalid string."""
        marks = parse_stop_strings(stop)
        silent = {n: i for n, i in self.codec.special_ids.items() if i in self.silent_ids}
        strings = {mark: mark for mark in marks if mark not in silent}
        for name in sorted(silent, key=len, reverse=True):  # a name may be part of another
            if any(name in mark for mark in strings):
                marker = chr(FIRST_MARKER + len(self.markers))
                self.markers[silent[name]] = marker
                strings = {mark.replace(name, marker): own for mark, own in strings.items()}
        return strings, {silent[mark]: mark for mark in marks if mark in silent}

    @property
    def text(self) -> str:
        """The text so far."""
        return self.remove_markers(self.marked)

    def remove_markers(self, text: str) -> str:
        """Return a part of `marked` as text."""
        if not self.markers:
            return text
        return text.translate({ord(marker): None for marker in self.markers.values()})

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or a call that must be the last one, is complete."""
        return self.ahead.rest is not None or self.stop_string is not None

    def push_tokens(self, ids: Sequence[int]) -> bool:
        """Append new tokens; returns True once the text ends the answer."""
        with convert_panics(self.codec.name):
            for token in ids:
                if self.stopped:
                    break
                self.ids.append(token)
                if token in self.markers:
                    self.append_marker(token)
                elif token not in self.silent_ids:
                    self.append_text(self.decoder.push(token))
        return self.stopped

    def push_end(self, token: int) -> None:
        """Take notice of the token that ended the answer and is no part of it, once."""
        if token in self.markers and not (self.stopped or self.has_ended):
            self.has_ended = True
            self.finish_text()
            self.append_marker(token)

    def append_marker(self, token: int) -> None:
        """Append the character for a token without text, unless a character is incomplete."""
        if not (self.decoder.is_incomplete or self.stopped):
            self.append_text(self.markers[token])

    def finish_text(self) -> None:
        """Replace an incomplete character at the end of the text."""
        if not self.stopped and (piece := self.decoder.finish()):
            self.append_text(piece)

    def append_text(self, piece: str) -> None:
        """Append new text, and cut it at a stop string that it completes.

        No stop string begins in a character of which any part belongs to the first `min_tokens`.
        """
        begin, self.marked = len(self.marked), self.marked + piece
        if len(self.ids) <= self.min_tokens:
            self.stop_begin = len(self.marked) + self.decoder.is_incomplete
        self.read_ahead(piece)
        # A stop string may begin in text of earlier steps, but not after a call has begun.
        places = {
            mark: self.marked.find(
                mark, max(begin - len(mark) + 1, self.stop_begin), self.call_begin
            )
            for mark in self.stop
        }
        if ends := [(at, mark) for mark, at in places.items() if at >= 0]:
            at, mark = min(ends)
            self.marked, self.stop_string = self.marked[:at], self.stop[mark]

    def read_ahead(self, piece: str) -> None:
        """Find out where new text begins a call, and cut it after one that must be the last."""
        if self.stop and self.format.calls is None:
            return
        # Character by character only while the place of a call is needed.
        size = 1 if self.stop and self.call_begin is None else len(piece)
        for begin in range(0, len(piece), max(size, 1)):
            self.ahead.feed(self.remove_markers(piece[begin : begin + size]))
            if self.call_begin is None and self.ahead.has_call:
                self.call_begin = len(self.marked) - len(piece) + begin + size
        if rest := self.ahead.rest:
            marks = {*self.markers.values()}
            shown = [place for place, each in enumerate(self.marked) if each not in marks]
            self.marked = self.marked[: shown[-len(rest)]]

    def take_text(self, *, final: bool = False) -> str:
        """Return the text since the last call; a possible start of a stop string is held back."""
        if final:
            self.finish_text()
        end = len(self.marked)
        if not (final or self.stopped or self.call_begin is not None):
            late = self.marked[self.stop_begin :]
            end -= max((overlap_length(late, mark) for mark in self.stop), default=0)
        piece, self.num_sent = self.marked[self.num_sent : end], max(end, self.num_sent)
        piece = self.remove_markers(piece)
        self.parser.feed(piece if self.stop else "", final=final)
        return piece


def parse_stop_strings(stop: Any) -> tuple[str, ...]:
    """Return the stop strings as a tuple; raises `OptionError` for an invalid or empty one."""
    marks = [stop] if isinstance(stop, str) else stop
    listed = isinstance(marks, Sequence) and not isinstance(marks, bytes | bytearray)
    if not listed or not all(isinstance(mark, str) for mark in marks):
        raise OptionError("stop", stop, "must be a string or a list of strings")
    if "" in marks:
        raise OptionError("stop", stop, "must not contain an empty string")
    return tuple(validate_text("stop", mark) for mark in marks)
