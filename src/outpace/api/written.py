"""Answers by their tokens, for conversations that go on with them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock

import numpy as np

from outpace.api.text import TextCodec

MAX_WRITTEN_ANSWERS = 256
"""Most answers that are kept; the least recently used one is dropped."""


class WrittenAnswers:
    """The tokens of the last answers, which replace others of the same text in later prompts.

    A client sends an answer back as text, of which a tokenizer may make other tokens, above all of
    calls. A prefix cache would end there.
    """

    def __init__(self, text: TextCodec) -> None:
        self.text = text
        self.answers: OrderedDict[bytes, tuple[int, list[int]]] = OrderedDict()
        """Length of a prompt and its answer, by the hash of the prompt."""
        self.lock = Lock()

    def add(self, prompt: Sequence[int], answer: list[int]) -> None:
        """Keep the answer to a prompt."""
        if not prompt:
            return
        key = blake2b(np.asarray(prompt, np.int32).tobytes()).digest()
        with self.lock:
            self.answers[key] = len(prompt), answer
            self.answers.move_to_end(key)
            if len(self.answers) > MAX_WRITTEN_ANSWERS:
                self.answers.popitem(last=False)

    def restore(self, ids: list[int]) -> list[int]:
        """Return a prompt in which kept answers to its beginnings have the tokens written."""
        with self.lock:
            lengths = sorted({length for length, _ in self.answers.values()})
        hashed, begin = blake2b(), 0
        for length in lengths:
            if length >= len(ids):
                break
            hashed.update(np.asarray(ids[begin:length], np.int32).tobytes())
            begin = length
            with self.lock:
                _, answer = self.answers.get(key := hashed.digest(), (0, []))
                if answer:
                    self.answers.move_to_end(key)
            is_same = ids[length : length + len(answer)] == answer
            if not is_same and (end := self.find_end(ids, length, answer)) is not None:
                ids = [*ids[:length], *answer, *ids[end:]]
        return ids

    def find_end(self, ids: list[int], begin: int, answer: list[int]) -> int | None:
        """Return the end of the tokens from `begin` on that are the text of an answer, or None."""
        text = self.text.decode(answer, special=True)
        ends = range(begin, min(len(ids), begin + len(text.encode())) + 1)

        def decode(end: int) -> str:
            return self.text.decode(ids[begin:end], special=True)

        place = bisect_left(ends, len(text), key=lambda end: len(decode(end)))
        return ends[place] if place < len(ends) and decode(ends[place]) == text else None
