"""Generated problems of the bundled models, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from zlib import crc32


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its answer, which may end in `#### ` and a result."""

    question: str
    answer: str

    @property
    def final_result(self) -> str:
        """The result after `#### `."""
        return self.answer.rpartition("#### ")[2]


@dataclass(frozen=True, slots=True)
class ProblemSplits:
    """Assignment of problems of one kind to splits."""

    names: tuple[str, ...]
    """Names of the splits; those other than `train` and `test` have separate questions."""
    test_every: int
    """One question in this many belongs to the split `test`."""

    def random_sources(self, split: str, count: int, seed: int, start: int) -> Iterator[Random]:
        """Return a random generator for each of the problems `start` to `start + count`.

        Each depends only on the seed, the split and its index.
        """
        if split not in self.names:
            raise ValueError(f"unknown split {split!r}: choose one of {', '.join(self.names)}")
        if count < 0 or start < 0:
            raise ValueError(f"count and start must not be negative, got {count} and {start}")
        return (Random(f"{split}/{seed}/{index}") for index in range(start, start + count))

    def contains(self, split: str, question: str) -> bool:
        """Return whether a question belongs to a split, by a hash of its text."""
        if split not in ("train", "test"):
            return True
        return (crc32(question.encode()) % self.test_every == 0) == (split == "test")
