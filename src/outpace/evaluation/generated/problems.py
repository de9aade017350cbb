"""Problems without end and by seed: what all kinds of them share."""

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
    def final(self) -> str:
        """The result: what stands after `#### `."""
        return self.answer.rpartition("#### ")[2]


@dataclass(frozen=True, slots=True)
class Splits:
    """How the problems of one kind are shared out.

    Attributes:
        names: of the splits; those but `train` and `test` have questions of their own.
        test_every: one question of so many belongs to the split `test`.
    """

    names: tuple[str, ...]
    test_every: int

    def sources(self, split: str, count: int, seed: int, start: int) -> Iterator[Random]:
        """The chance that makes problems `start` to `start + count`, each from its index alone."""
        if split not in self.names:
            raise ValueError(f"unknown split {split!r}: choose one of {', '.join(self.names)}")
        if count < 0 or start < 0:
            raise ValueError(f"count and start must not be negative, got {count} and {start}")
        return (Random(f"{split}/{seed}/{index}") for index in range(start, start + count))

    def holds(self, split: str, question: str) -> bool:
        """Whether a question falls into a split: no list to store, the same in every process."""
        if split not in ("train", "test"):
            return True
        return (crc32(question.encode()) % self.test_every == 0) == (split == "test")
