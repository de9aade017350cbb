"""Texts of a conversation, and marks in them that show where a chat template writes each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Message = dict[str, Any]
Authors = dict[int, bool]
"""Whether the assistant wrote a character of a prompt, by its place; without the template's own."""
Patterns = Mapping[bool, re.Pattern[str]]
"""What to look for in a text, by whether the assistant wrote it."""
Change = Callable[[str, bool], str]
"""From a text, and whether the assistant wrote it, to another."""


def any_of(words: Sequence[str]) -> re.Pattern[str]:
    """A pattern of one of these, the longest first."""
    longest = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


@dataclass(frozen=True)
class Part:
    """A message or a variable of the template; `own` says that the assistant wrote it."""

    name: str
    key: int | str
    value: Any
    own: bool = False

    @classmethod
    def all(cls, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[Part]:
        """Everything of a request that a template can write."""
        return [
            *(
                cls(f"messages[{index}]", index, message, message["role"] == "assistant")
                for index, message in enumerate(messages)
            ),
            *(cls(f"the template variable {key}", key, value) for key, value in variables.items()),
        ]

    @property
    def texts(self) -> list[str]:
        """All of its texts but the role of a message."""
        found: list[str] = []

        def note(text: str, own: bool) -> str:
            found.append(text)
            return text

        self.changed(note)
        return found

    def changed(self, change: Change) -> Part:
        """With each text changed, in lists and objects too."""

        def walk(value: Any, *, message: bool = False) -> Any:
            match value:
                case str():
                    return change(value, self.own)
                case Mapping():
                    return {
                        key if message else walk(key): each
                        if message and key == "role"
                        else walk(each)
                        for key, each in value.items()
                    }
                case list() | tuple():
                    return [walk(each) for each in value]
            return value

        return replace(self, value=walk(self.value, message=isinstance(self.key, int)))

    def holds(self, patterns: Patterns) -> bool:
        """Whether one of its texts has what is looked for."""
        return any(map(patterns[self.own].search, self.texts))


class Mark(NamedTuple):
    """What a mark stands for: a character, or the border before (1) or after (-1) a text."""

    text: str
    own: bool
    side: int = 0


class Markers:
    """Texts without control tokens, from which the text with them can be read.

    Args:
        hidden: control tokens in texts.
        edges: their first and last characters.
        kept: words to leave as they are, since the template may look for them. Where one holds a
            control token its borders are marked.
        free: characters that occur nowhere.
    """

    def __init__(
        self,
        hidden: Patterns,
        edges: re.Pattern[str],
        kept: Mapping[bool, Sequence[str]],
        free: Iterator[str],
    ) -> None:
        self.hidden, self.edges, self.free = hidden, edges, free
        self.fenced = {own: any_of([w for w in kept[own] if hidden[own].search(w)]) for own in kept}
        self.known = {
            own: re.compile(
                f"(?P<fenced>{self.fenced[own].pattern})|(?P<control>{hidden[own].pattern})"
                f"|(?P<kept>{any_of(kept[own]).pattern})|{edges.pattern}"
            )
            for own in kept
        }
        self.marks: dict[Mark, str] = {}

    def mark(self, text: str, own: bool, side: int = 0) -> str:
        """The character that stands for something."""
        mark = Mark(text, own, side)
        if mark not in self.marks:
            self.marks[mark] = next(self.free)
        return self.marks[mark]

    def hide(self, text: str, own: bool) -> str:
        """A text with marks; `ValueError` where a control token cannot be hidden."""
        # A template may look at how a text begins or ends, but for white space.
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())

        def change(match: re.Match[str]) -> str:
            word = match.group()
            if match.lastgroup == "kept":
                return word
            if match.lastgroup != "fenced":
                return self.edges.sub(lambda edge: self.mark(edge.group(), own), word)
            before = "" if match.start() <= first else self.mark(word, own, 1)
            after = "" if match.end() >= last else self.mark(word, own, -1)
            if not before + after:
                raise ValueError("the text is a word that the template looks for")
            return before + word + after

        changed = self.known[own].sub(change, text)
        if self.hidden[own].search(self.fenced[own].sub("\0", changed)):
            raise ValueError("a control token overlaps what the template looks for")
        return changed

    def read(self, rendered: str) -> tuple[str, Authors]:
        """Rendered text without marks, and who wrote what is marked in it."""
        meanings = {character: mark for mark, character in self.marks.items()}
        pattern = any_of([*meanings])
        authors: Authors = {}
        borders: list[tuple[int, Mark]] = []
        for match in pattern.finditer(rendered):
            mark, place = meanings[match.group()], match.start() - len(borders)
            if mark.side:
                borders.append((place, mark))
            else:
                authors[place] = mark.own
        plain = pattern.sub(
            lambda match: "" if (mark := meanings[match.group()]).side else mark.text, rendered
        )
        for place, (text, own, side) in borders:
            begin = place if side > 0 else place - len(text)
            if begin >= 0 and plain.startswith(text, begin):
                authors |= dict.fromkeys(range(begin, begin + len(text)), own)
        return plain, authors
