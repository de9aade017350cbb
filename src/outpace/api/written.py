"""Answers by their tokens, for conversations that go on with them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

import numpy as np

from outpace.api.output import Output
from outpace.api.text import TextCodec

MAX_WRITTEN_ANSWERS = 256
"""Most answers that are kept; the least recently used one is dropped."""


class WrittenAnswer(NamedTuple):
    """An answer to a prompt of this many tokens."""

    prompt_length: int
    ids: list[int]
    calls: str
    """Its calls as a template writes them, if the answer has nothing else; or empty."""


class WrittenAnswers:
    """The tokens of the last answers, which replace others of the same text or calls in prompts.

    A client sends an answer back as text, of which a tokenizer may make other tokens, or as calls,
    which a template may write in another form. A prefix cache would end there.
    """

    def __init__(self, text: TextCodec) -> None:
        self.text = text
        self.answers: OrderedDict[bytes, WrittenAnswer] = OrderedDict()
        """Answers by the hash of their prompt."""
        self.lock = Lock()

    def add(self, prompt: Sequence[int], output: Output) -> None:
        """Keep the answer to a prompt."""
        if not prompt:
            return
        key = blake2b(np.asarray(prompt, np.int32).tobytes()).digest()
        answer = WrittenAnswer(len(prompt), output.ids, self.write_calls(output))
        with self.lock:
            self.answers[key] = answer
            self.answers.move_to_end(key)
            if len(self.answers) > MAX_WRITTEN_ANSWERS:
                self.answers.popitem(last=False)

    def write_calls(self, output: Output) -> str:
        """Return the calls of a complete answer that has nothing else, or an empty text."""
        form, parts = self.text.call_format, output.parts
        if form is None or parts.reasoning or parts.text or not parts.calls:
            return ""
        if output.finish_reason != "stop":  # a further call may be cut
            return ""
        try:
            calls = [(each.name, json.loads(each.arguments)) for each in parts.calls]
        except (ValueError, RecursionError):  # no client can send them back
            return ""
        return form.write_calls((n, json.dumps(a, ensure_ascii=False)) for n, a in calls)

    def restore(self, ids: list[int]) -> list[int]:
        """Return a prompt in which kept answers to its beginnings have the tokens written."""
        with self.lock:
            lengths = sorted({answer.prompt_length for answer in self.answers.values()})
        hashed, begin = blake2b(), 0
        for length in lengths:
            if length >= len(ids):
                break
            hashed.update(np.asarray(ids[begin:length], np.int32).tobytes())
            begin = length
            with self.lock:
                if answer := self.answers.get(key := hashed.digest()):
                    self.answers.move_to_end(key)
            if answer and (end := self.find_end(ids, answer)) is not None:
                ids = [*ids[:length], *answer.ids, *ids[end:]]
        return ids

    def find_end(self, ids: list[int], answer: WrittenAnswer) -> int | None:
        """Return the end of an answer in a prompt that has its text or its calls, or None."""
        begin = answer.prompt_length
        if ids[begin : begin + len(answer.ids)] == answer.ids:
            return begin + len(answer.ids)
        end = self.find_text(ids, begin, self.text.decode(answer.ids, special=True))
        if end is None and answer.calls:
            end = self.find_text(ids, begin, answer.calls)
            # Otherwise further calls may follow, which the answer did not have.
            return end if end and {*ids[end : end + 1]} & self.text.turn_ends else None
        return end

    def find_text(self, ids: list[int], begin: int, text: str) -> int | None:
        """Return the end of the tokens from `begin` on that decode to a text, or None."""
        ends = range(begin, min(len(ids), begin + len(text.encode())) + 1)

        def decode(end: int) -> str:
            return self.text.decode(ids[begin:end], special=True)

        place = bisect_left(ends, len(text), key=lambda end: len(decode(end)))
        return ends[place] if place < len(ends) and decode(ends[place]) == text else None
