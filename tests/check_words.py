"""Check the words of pages, docstrings, comments and messages: python tests/check_words.py.

Prints each banned word with its place, and each page whose sentences are too long, and exits with
1 if there are any. Code, quotations and links are not checked.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_SENTENCE = 20
"""Words of a sentence, as the mean of a page."""

BANNED = {
    "say|says|said|saying": "generate, emit, return or report",
    "tell|tells|told|telling": "report or notify",
    "hear|hears|heard": "receive",
    "know|knows|knew": "has, supports or recognizes",
    "behind(?! a proxy)": "after, past or following",
    "in front of": "before",
    "so many": "this many",
    r"(?<!there )(?:is|are) none": "is missing or is invalid",
    r"of (?:its|their) own(?! \w)": "separate",
    "who waits|who wait": "a noun, such as waiting request",
    "anew": "again",
    "but for": "except",
}
"""Words that are not those of the field, and what to write instead."""
PATTERN = re.compile("|".join(rf"(\b(?:{words})\b)" for words in BANNED), re.IGNORECASE)
ADVICE = ["", *BANNED.values()]
QUOTED = re.compile(
    r"```.*?```|~~~.*?~~~|``.+?``|`[^`]+`|\"[^\"]*\"|“[^”]*”|\]\([^)]*\)", re.DOTALL
)
STRING_MARKS = re.compile(r"^[a-zA-Z]*(\"{3}|'{3}|\"|')|(\"{3}|'{3}|\"|')$")
"""Prefix and quotes of a string of a program."""


def blank(text: str) -> str:
    """A text with spaces in place of what is quoted, so that lines keep their numbers."""
    return QUOTED.sub(lambda match: re.sub(r"\S", " ", match[0]), text)


def list_pages() -> list[Path]:
    """Pages that people write and read; the changelog repeats names of old releases."""
    folders = (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "benchmarks" / "results")
    pages = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    return [page for page in pages if page.name != "CHANGELOG.md"]


def find_words(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """Line numbers and messages of banned words in a text."""
    for number, line in enumerate(blank(text).split("\n"), first):
        for match in PATTERN.finditer(line.replace("None", "")):
            yield number, f'"{match[0]}": write {ADVICE[match.lastindex or 0]}'


def find_in_code(source: str) -> Iterator[tuple[int, str]]:
    """The same in comments and strings of a program; a string of one word is a name."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and " " in token.string
        if is_text or token.type == tokenize.COMMENT:
            yield from find_words(STRING_MARKS.sub("", token.string), token.start[0])


def mean_sentence(text: str) -> float:
    """Words per sentence of the running text of a page; 0 if it has none."""
    lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n")
    prose = [
        re.sub(r"^\s*(?:[-*>]|\d+\.)\s+", "\n", line) for line in lines if line[:1] not in "|#!:"
    ]
    sentences = re.split(r"[.!?:;]\s+|\n\s*\n", "\n".join(prose))
    counts = [len(sentence.split()) for sentence in sentences if len(sentence.split()) > 2]
    return sum(counts) / len(counts) if counts else 0.0


def list_subjects() -> list[str]:
    """Subjects of commits since this check exists; none where the history is not there."""
    log = ["git", "-C", str(ROOT), "log", "--format=%H %s"]
    added = subprocess.run(
        [*log, "--diff-filter=A", "--", __file__], capture_output=True, text=True
    ).stdout.split()
    if not added:
        return []
    since = subprocess.run([*log, f"{added[0]}.."], capture_output=True, text=True)
    return [line.partition(" ")[2] for line in since.stdout.splitlines()]


def main() -> int:
    """Print what is wrong; returns the exit status."""
    faults = []
    for page in list_pages():
        text, name = page.read_text("utf-8"), page.relative_to(ROOT)
        faults += [f"{name}:{line}: {fault}" for line, fault in find_words(text)]
        if (mean := mean_sentence(text)) > MAX_SENTENCE:
            faults.append(f"{name}: {mean:.1f} words per sentence, at most {MAX_SENTENCE}")
    for path in sorted((ROOT / "src").rglob("*.py")):
        name = path.relative_to(ROOT)
        found = find_in_code(path.read_text("utf-8"))
        faults += [f"{name}:{line}: {fault}" for line, fault in found]
    for subject in list_subjects():
        faults += [f"commit {subject!r}: {fault}" for _, fault in find_words(subject)]
    print(*faults, sep="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
