"""Training data for a model: its answers to files of prompts, checked and split, in a folder."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any, Unpack

from outpace.api.llm import LLM
from outpace.api.options import Options, check_options
from outpace.checkpoints.fingerprint import Fingerprint
from outpace.data.answers import ChatPrompt, answer_prompts, read_prompts
from outpace.errors import ContextError, OptionError
from outpace.field_types import is_finite_real
from outpace.jsonl import read_content, read_records

WORDS_PER_GRAM = 10
"""Consecutive words that count as an overlap."""

WORD = re.compile(r"\w+")


class OverlapIndex:
    """All sequences of ten words in the texts of files, to find them in other texts."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read JSON lines, of which every text counts, or plain text."""
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
    if path.suffix == ".txt":
        yield read_content(path).decode("utf-8", "replace")
        return
    for _, record in read_records(path):
        yield from nested_texts(record)


def nested_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from nested_texts(each)


TRAINING_FILE, HELD_OUT_FILE, CARD_FILE = "train.jsonl", "held.jsonl", "data.json"

FIXED_FIELDS = "fingerprint", "options", "held_out"
"""Fields of a card that a later run must repeat."""

Progress = Callable[[str, int, int, int], None]
"""Receives the name of a file, and the counts of `answer_file`."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts of files by location, without repetitions and overlaps."""

    training: Mapping[str, ChatPrompt]
    held_out: Mapping[str, ChatPrompt]
    held_out_share: float
    """Share of the prompts that is held out."""
    excluded: OverlapIndex
    """Texts that no prompt overlaps with."""
    read: int
    repeated: int
    """Number of prompts left out because they occur earlier."""
    overlapping: Mapping[str, int]
    """Number of prompts left out because of an overlap, by excluded file."""

    @property
    def by_file(self) -> dict[str, Mapping[str, ChatPrompt]]:
        """Prompts by the file of their answers, without empty ones; the smaller file first."""
        files = {HELD_OUT_FILE: self.held_out, TRAINING_FILE: self.training}
        return {name: prompts for name, prompts in files.items() if prompts}


def read_prompt_set(
    sources: Sequence[Path], *, held_out: float = 0.0, exclude: Sequence[Path] = ()
) -> PromptSet:
    """Read files of prompts: JSON lines with `prompt` or `messages`, or text with one per line.

    Whether a prompt is held out depends on its text alone, so adding prompts moves none. Prompts
    that share ten words with a file of `exclude` are left out.

    Raises:
        ValueError: If a file or line is invalid, or no prompt is left for training.
    """
    if not (is_finite_real(held_out) and 0 <= held_out < 1):
        raise OptionError("held_out", held_out, "must be a share of at least 0 and below 1")
    index, read, overlapping = OverlapIndex(exclude), 0, Counter[str]()
    remaining: dict[bytes, tuple[str, ChatPrompt]] = {}
    digests = set[bytes]()
    for place, prompt in (each for path in sources for each in locate_prompts(path)):
        read += 1
        if (digest := digest_prompt(prompt)) in digests:
            continue
        digests.add(digest)
        if (found := index.find_overlap(prompt)) is None:
            remaining[digest] = place, prompt
        else:
            overlapping[str(found)] += 1
    held = {digest for digest in remaining if int.from_bytes(digest[:8]) < held_out * 2**64}
    if len(held) == len(remaining):
        names = ", ".join(map(str, sources))
        raise ValueError(f"prompts: none of the {read} in {names} is left for training; give more")
    return PromptSet(
        training=dict(each for digest, each in remaining.items() if digest not in held),
        held_out=dict(each for digest, each in remaining.items() if digest in held),
        held_out_share=held_out,
        excluded=index,
        read=read,
        repeated=read - len(digests),
        overlapping=overlapping,
    )


def smallest_share(prompts: PromptSet) -> float | None:
    """Return the smallest share in thousandths that holds a prompt out, unless it takes all."""
    shares = sorted(
        ceil((int.from_bytes(digest_prompt(prompt)[:8]) + 1) / 2**64 * 1000) / 1000
        for prompt in (*prompts.training.values(), *prompts.held_out.values())
    )
    return shares[0] if shares[0] < shares[-1] else None


def digest_prompt(prompt: ChatPrompt) -> bytes:
    """Return a digest of a prompt that does not depend on its white space."""
    words = [" ".join(text.split()) for text in nested_texts(prompt)]
    return sha256(json.dumps(words).encode()).digest()


def locate_prompts(path: Path) -> Iterator[tuple[str, ChatPrompt]]:
    """Yield location and prompt of each line; empty lines of a `.txt` file are skipped."""
    if path.suffix != ".txt" or not path.is_file():
        for line, prompt in enumerate(read_prompts(path), 1):
            yield f"{path}:{line}", prompt
        return
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    for line, text in enumerate(lines, 1):
        if text.strip():
            yield f"{path}:{line}", text.strip()


def read_prompt_file(path: Path) -> list[ChatPrompt]:
    """Return the prompts of JSON lines, or of a `.txt` file with one per line."""
    if found := [prompt for _, prompt in locate_prompts(path)]:
        return found
    raise ValueError(f"prompts: {path} has no prompts; give JSON lines, or .txt with one per line")


def make_data(
    llm: LLM,
    fingerprint: Fingerprint,
    prompts: PromptSet,
    folder: Path,
    *,
    batch: int = 64,
    progress: Progress = lambda name, done, total, tokens: None,
    **options: Unpack[Options],
) -> dict[str, Any]:
    """Answer prompts, and write training data, held-out data and their card to a folder.

    An interrupted run continues where it stopped. Each line has the fingerprint of the model.
    Prompts that exceed its context are left out.

    Returns:
        The content of the card `data.json`.

    Raises:
        ValueError: For an invalid option, or if the folder has answers of another model, with other
            options or to other prompts.
    """
    check_options(options)
    card: dict[str, Any] = {
        "model": llm.name,
        "fingerprint": fingerprint.as_record(),
        "options": json.loads(json.dumps(options, default=repr)),
        "held_out": prompts.held_out_share,
    }
    check_card(folder, card)
    folder.mkdir(parents=True, exist_ok=True)
    write_card(folder, card)
    too_long = 0
    for name, part in prompts.by_file.items():
        skipped = find_too_long(llm, [*part.values()], options)
        too_long += len(skipped)
        answer_prompts(
            llm,
            [*part],
            [*part.values()],
            folder / name,
            batch=batch,
            progress=partial(progress, name),
            fields={"fingerprint": fingerprint.as_record()},
            skipped=skipped,
            **options,
        )
    card["prompts"] = {
        "read": prompts.read,
        "repeated": prompts.repeated,
        "too_long": too_long,
        "overlapping": dict(prompts.overlapping),
    }
    card["files"] = {
        name: count_answers(folder / name, prompts.excluded, llm) for name in prompts.by_file
    }
    write_card(folder, card)
    return card


def find_too_long(llm: LLM, prompts: Sequence[ChatPrompt], options: Options) -> set[int]:
    lines = set[int]()
    for line, prompt in enumerate(prompts, 1):
        try:
            llm.prepare(prompt, **options)
        except ContextError:
            lines.add(line)
    return lines


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    (folder / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n", "utf-8")


def check_card(folder: Path, card: Mapping[str, Any]) -> None:
    path = folder / CARD_FILE
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text("utf-8"))
        for each in (found, card):
            each["options"].setdefault("seed", 0)
        other = [name for name in FIXED_FIELDS if found[name] != card[name]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"output: {path} is not the card of training data; give another folder"
        ) from error
    if other:
        raise ValueError(
            f"output: {folder} has answers with another {' and another '.join(other)}; repeat the "
            "earlier command, or give another folder"
        )


def count_answers(path: Path, excluded: OverlapIndex, llm: LLM) -> dict[str, Any]:
    records = [record for _, record in read_records(path)]
    answers = [
        record["response"] if "response" in record else record["messages"][-1]["content"]
        for record in records
    ]
    found = Counter(str(each) for each in map(excluded.find_overlap, answers) if each is not None)
    return {
        "answers": len(records),
        "tokens": sum(len(llm.text.encode(text, raw=True)) for text in answers if text),
        "truncated": sum("finish_reason" in record for record in records),
        "overlapping": dict(found),
    }
