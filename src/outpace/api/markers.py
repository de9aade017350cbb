"""Texts of a conversation, and markers in them that show where a chat template writes each."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outpace.api.codec import take_unused_character
from outpace.constraint.calls import TOOL_VARIABLES

Message = dict[str, Any]
AuthorMap = dict[int, bool]
"""Whether the assistant wrote a character, by position in the prompt; not of the template's."""
AuthorPatterns = Mapping[bool, re.Pattern[str]]
"""Patterns to search for in a string, by whether the assistant wrote it."""
AuthorWords = Mapping[bool, Sequence[str]]
"""Words to search for in a string, by whether the assistant wrote it."""
TextChange = Callable[[str, bool], str]
"""Function from a string, and whether the assistant wrote it, to a new string."""


def match_any(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the words, the longest first."""
    longest = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


@dataclass(frozen=True)
class TemplatePart:
    """A message or a variable of a chat template.

    Attributes:
        name: Name in error messages.
        key: Index of the message, or name of the variable.
        value: The message or value.
        by_assistant: Whether the assistant wrote it.
    """

    name: str
    key: int | str
    value: Any
    by_assistant: bool = False

    @classmethod
    def collect_parts(
        cls, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> list[TemplatePart]:
        """Return all parts of a request that a template can write."""
        return [
            *(
                cls(f"messages[{index}]", index, message, message["role"] == "assistant")
                for index, message in enumerate(messages)
            ),
            *(
                cls("tools" if key in TOOL_VARIABLES else f"template.{key}", key, value)
                for key, value in variables.items()
            ),
        ]

    @property
    def texts(self) -> list[str]:
        """All texts of the part, except the role of a message."""
        found: list[str] = []

        def note(text: str, own: bool) -> str:
            found.append(text)
            return text

        self.map_texts(note)
        return found

    def map_texts(self, change: TextChange) -> TemplatePart:
        """Return the part with `change` applied to each text, also in lists and mappings."""

        def walk(value: Any, *, message: bool = False) -> Any:
            match value:
                case str():
                    return change(value, self.by_assistant)
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

    def matches_any(self, patterns: AuthorPatterns) -> bool:
        """Return whether one of its texts matches the pattern of its author."""
        return any(map(patterns[self.by_assistant].search, self.texts))


class Mark(NamedTuple):
    """What a marker represents: a character, or a border of a word.

    Attributes:
        text: The character or word.
        by_assistant: Whether the assistant wrote it.
        side: 1 for the border before a word, -1 for the border after it, 0 for a character.
        is_lone: Whether the word has no border on its other side.
    """

    text: str
    by_assistant: bool
    side: int = 0
    is_lone: bool = False


class Markers:
    """Replaces control tokens in texts by markers, from which the original text is restored.

    Args:
        hidden: Patterns of control tokens.
        edges: Pattern of their first and last characters.
        kept: Words to leave unchanged, since the template may search for them.
        fenced: Words whose borders are marked, since they are control tokens or parts of them.
        free: Characters that occur nowhere.
        inner: Fenced words with a single border where a string begins or ends with them, since the
            template may search for that.
    """

    def __init__(
        self,
        hidden: AuthorPatterns,
        edges: re.Pattern[str],
        kept: AuthorWords,
        fenced: AuthorWords,
        free: Iterator[str],
        *,
        inner: Collection[str] = (),
    ) -> None:
        self.hidden, self.edges, self.free, self.inner = hidden, edges, free, inner
        # A template that searches for a word inside another may leave a part of the other one.
        words = {word for each in fenced.values() for word in each}
        self.outer_words = {
            word for word in words if not any(each in word for each in words - {word})
        }
        self.patterns = {
            own: re.compile(
                f"(?P<fenced>{match_any(fenced[own]).pattern})|(?P<control>{pattern.pattern})"
                f"|(?P<kept>{match_any(kept[own]).pattern})|{edges.pattern}"
            )
            for own, pattern in hidden.items()
        }
        self.marks: dict[Mark, str] = {}

    def find_marker(self, *fields: Any) -> str:
        """Return the marker character of a `Mark` with these fields."""
        mark = Mark(*fields)
        if mark not in self.marks:
            self.marks[mark] = take_unused_character(self.free)
        return self.marks[mark]

    def fence_word(self, word: str, own: bool, *, first: bool, last: bool) -> str:
        """Return a word with both borders, or with one if it begins or ends a string."""
        if first and last:
            raise ValueError("the text is a word that the template searches for")
        before = "" if first else self.find_marker(word, own, 1, last)
        return before + word + ("" if last else self.find_marker(word, own, -1, first))

    def hide_tokens(self, text: str, own: bool) -> str:
        """Return a string with markers; raises `ValueError` if a control token cannot be hidden."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())

        def change(match: re.Match[str]) -> str:
            word = match.group()
            if match.lastgroup == "kept":
                return word
            if match.lastgroup != "fenced":
                return self.edges.sub(lambda edge: self.find_marker(edge.group(), own), word)
            inner = word in self.inner
            first, last = match.start() <= begin, match.end() >= end
            return self.fence_word(word, own, first=inner and first, last=inner and last)

        changed = self.patterns[own].sub(change, text)
        bare = self.patterns[own].sub(
            lambda m: "\0" if m.lastgroup == "fenced" else change(m), text
        )
        if self.hidden[own].search(bare):
            raise ValueError("a control token overlaps a word that the template searches for")
        return changed

    def restore_text(self, rendered: str) -> tuple[str, AuthorMap]:
        """Restore a rendered text.

        Returns:
            The text without markers, and the author of each marked character.

        Raises:
            ValueError: If a part of a word may remain without a marker.
        """
        meanings = {character: mark for mark, character in self.marks.items()}
        pattern = match_any([*meanings])
        authors: AuthorMap = {}
        borders: list[tuple[int, Mark]] = []
        for match in pattern.finditer(rendered):
            mark, place = meanings[match.group()], match.start() - len(borders)
            if mark.side:
                borders.append((place, mark))
            else:
                authors[place] = mark.by_assistant
        plain = pattern.sub(
            lambda match: "" if (mark := meanings[match.group()]).side else mark.text, rendered
        )
        self.restore_words(plain, borders, authors)
        return plain, authors

    def restore_words(
        self, plain: str, borders: Sequence[tuple[int, Mark]], authors: AuthorMap
    ) -> None:
        """Add the author of each word between borders to `authors`."""
        pairs, torn = set(borders), []
        for place, mark in borders:
            size = len(mark.text)
            begin = place if mark.side > 0 else place - size
            far = place + mark.side * size, mark._replace(side=-mark.side)
            # A template that drops a word leaves its borders, perhaps next to the same word.
            if (mark.is_lone or far in pairs) and begin >= 0 and plain.startswith(mark.text, begin):
                authors |= dict.fromkeys(range(begin, begin + size), mark.by_assistant)
            elif mark.text not in self.outer_words:
                torn.append((place, mark))
        for place, mark in torn:
            inside, end = (place, 0) if mark.side > 0 else (place - 1, -1)
            if inside not in authors and plain[inside : inside + 1] == mark.text[end]:
                raise ValueError("a part of a word may remain")
