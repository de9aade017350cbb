"""Overlap of texts with files that must not be trained on, such as the problems of a benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outpace.jsonl import read_content, read_records

WORDS_PER_GRAM = 10
"""Consecutive words that count as an overlap."""

WORD = re.compile(r"\w+")


class OverlapIndex:
    """All sequences of ten words in the texts of files, to find them in other texts."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read JSON lines, of which every text counts, or plain text.

        Raises:
            ValueError: If a file is missing, invalid, or has no ten words in a row.
        """
        self.grams: dict[str, Path] = {}
        for path in paths:
            if not path.is_file():
                raise ValueError(f"exclude: no file {str(path)!r}; give JSON lines or plain text")
            grams = {gram for text in iterate_texts(path) for gram in iterate_grams(text)}
            if not grams:
                raise ValueError(
                    f"exclude: {path} has no text of {WORDS_PER_GRAM} words; leave it out"
                )
            self.grams |= dict.fromkeys(grams, path)

    def find_overlap(self, value: Any) -> Path | None:
        """Return a file that shares ten consecutive words with a text in a JSON value, if any."""
        grams = (gram for text in nested_texts(value) for gram in iterate_grams(text))
        return next((self.grams[gram] for gram in grams if gram in self.grams), None)


def iterate_grams(text: str) -> Iterator[str]:
    """Yield every sequence of ten words of a text, in lower case and without punctuation."""
    words = WORD.findall(text.lower())
    for start in range(len(words) - WORDS_PER_GRAM + 1):
        yield " ".join(words[start : start + WORDS_PER_GRAM])


def iterate_texts(path: Path) -> Iterator[str]:
    """Yield every text in a file of JSON lines, or the whole of a `.txt` file."""
    if path.suffix == ".txt":
        yield read_content(path).decode("utf-8", "replace")
        return
    for _, record in read_records(path):
        yield from nested_texts(record)


def nested_texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from nested_texts(each)
