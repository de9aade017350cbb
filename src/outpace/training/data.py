"""Training examples by number: JSON lines, or problems that the zoo makes up on the fly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outpace.zoo import story, table
from outpace.zoo.problems import Problem

STORY = "story:"
PROBLEMS = {STORY: story.problems, "table:": table.problems}
"""What the zoo makes up, by what a path begins with."""

Conversation = tuple[list[dict[str, str]], str, bool]
"""Messages, the answer to them, and whether that is whole."""


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenised example.

    Attributes:
        prompt: ids that are given.
        response: ids to learn, the end token included where there is one.
        marks: which response tokens stand between the marks of the data options.
        ended: whether the response ends; a cut text does not.
    """

    prompt: list[int]
    response: list[int]
    marks: list[bool]
    ended: bool = True


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where examples come from.

    Attributes:
        path: a file of JSON lines, `{"prompt", "response"}` or `{"messages": [...]}`, or problems
            of the zoo, `story:train` or `table:train`; or several of these. A response does not
            end where its line has the `finish_reason` "length".
        turns: how many examples each of several paths gives before the next one does; 1 each.
        drills: share of stories replaced by a line of bare equations (`story:` only).
        plain: whether answers take the first wording of each sentence (`story:` only).
        mark: a regular expression; the response tokens that it touches are marked, so that an
            objective can weigh them more or start there.
        end: the token that ends a response; the tokenizer's end-of-sequence by default.
        longest: examples are cut to this many tokens, or to what the model was made for.
    """

    path: str | tuple[str, ...]
    turns: tuple[int, ...] | None = None
    drills: float = 0.0
    plain: bool = False
    mark: str | None = None
    end: str | None = None
    longest: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.drills <= 1:
            raise ValueError(f"drills is a share between 0 and 1, not {self.drills}")
        if (self.drills or self.plain) and not any(path.startswith(STORY) for path in self.paths):
            raise ValueError(
                f"drills belong to {STORY}train, as plain does; {self.path!r} has neither"
            )
        if len(self.counts) != len(self.paths) or min(self.counts, default=0) < 1:
            raise ValueError(f"turns are one count from 1 on for each path, not {self.turns}")
        try:
            re.compile(self.mark or "")
        except re.error as error:
            raise ValueError(f"mark {self.mark!r} is no regular expression: {error}") from error
        if self.longest < 2:
            raise ValueError(f"longest must leave room for two tokens, not {self.longest}")

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths, be they one or more."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def counts(self) -> tuple[int, ...]:
        """Examples of each path in one turn of all."""
        return (1,) * len(self.paths) if self.turns is None else self.turns


class Examples:
    """Example number n of an endless stream: a function of the seed and n alone."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        """Open the sources; a missing or malformed one is refused here."""
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer names no end token; set its eos_token")
        self.data, self.tokenizer, self.seed = data, tokenizer, seed
        self.end = int(tokenizer.eos_token_id)
        if data.end is not None:
            self.end = only_token(tokenizer, data.end)
        self.mark = None if data.mark is None else re.compile(data.mark)
        self.sources = [source(path, seed, data.plain) for path in data.paths]
        # Of each example in a turn: its path, and its number among those of this path.
        self.turn = [(who, place) for who, n in enumerate(data.counts) for place in range(n)]
        for number in range(len(self.turn)):
            self[number]

    def __getitem__(self, number: int) -> Example:
        """Tokenise one example."""
        turn, place = divmod(number, len(self.turn))
        who, place = self.turn[place]
        place += turn * self.data.counts[who]
        rng = np.random.default_rng([self.seed, number, 0])
        drills = self.data.drills if self.data.paths[who].startswith(STORY) else 0.0
        if drills and rng.random() < drills:
            return self.example([], story.drill(Random(int(rng.integers(1 << 62)))))
        return self.chat(*self.sources[who](place))

    def chat(self, messages: list[dict[str, str]], answer: str, ended: bool) -> Example:
        """Tokenise a conversation, by the tokenizer's chat template where it has one."""
        if self.tokenizer.chat_template is None:
            prompt = "\n".join(message["content"] for message in messages)
        else:
            prompt = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return self.example(list(ids), answer, ended=ended)

    def example(self, prompt: list[int], answer: str, *, ended: bool = False) -> Example:
        """Tokens of prompt and answer, cut where they are too long."""
        encoded = self.tokenizer(
            answer, add_special_tokens=False, return_offsets_mapping=self.mark is not None
        )
        response = list(encoded["input_ids"])
        marks = [False] * len(response)
        if self.mark is not None:
            marks = touched(self.mark, answer, encoded["offset_mapping"])
        if ended:
            response, marks = [*response, self.end], [*marks, False]
        room = max(self.data.longest - len(prompt), 1)
        if len(response) > room:
            prompt, ended = prompt[-self.data.longest + 1 :], False
        return Example(prompt, response[:room], marks[:room], ended)


def touched(mark: re.Pattern[str], text: str, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens, given their places in a text, a regular expression touches."""
    spans = [match.span() for match in mark.finditer(text)]
    return [any(a < end and start < b for a, b in spans) for start, end in offsets]


def source(path: str, seed: int, plain: bool) -> Callable[[int], Conversation]:
    """What gives the conversations of a path by number."""
    for kind, make in PROBLEMS.items():
        if path.startswith(kind):
            if path != f"{kind}train":
                raise ValueError(f"{path!r} is not for training; use {kind}train")
            options = {"plain": plain} if kind == STORY else {}
            return partial(posed, partial(make, "train", 1, seed=seed, **options))
    return Lines(Path(path), seed).conversation


def posed(make: Callable[..., list[Problem]], number: int) -> Conversation:
    """Problem number n as a conversation."""
    (problem,) = make(start=number)
    return [{"role": "user", "content": problem.question}], problem.answer, True


class Lines:
    """A file of JSON lines, shuffled anew each epoch."""

    def __init__(self, path: Path, seed: int) -> None:
        """Open the file."""
        self.path, self.seed, self.lines = path, seed, lines_of(path)
        self.order = -1, np.arange(0)

    def conversation(self, number: int) -> Conversation:
        """Line number n of the endless stream."""
        epoch, place = divmod(number, len(self.lines))
        if self.order[0] != epoch:
            shuffle = np.random.default_rng([self.seed, epoch, 1])
            self.order = epoch, shuffle.permutation(len(self.lines))
        line = int(self.order[1][place])
        return conversation(self.lines[line], f"{self.path}:{line + 1}")


def only_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The token that a text is."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"end {text!r} is {len(ids)} tokens of this tokenizer; name one token")
    return int(ids[0])


def lines_of(path: Path) -> list[str]:
    """The lines of a file, without empty ones at its end."""
    if not path.is_file():
        raise ValueError(f"no data at {str(path)!r}; give a file of JSON lines, or story:train")
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be loaded as UTF-8: {error}") from error
    if not text:
        raise ValueError(f"{str(path)!r} is empty; it needs at least one example")
    # Not `splitlines`, which also cuts at characters that may stand in a JSON string.
    return text.split("\n")


def conversation(line: str, where: str) -> Conversation:
    """Messages of a line, the answer to them, and whether that is whole."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    ended = not isinstance(record, dict) or record.get("finish_reason") != "length"
    match record:
        case {"response": ""} | {"messages": [*_, {"role": "assistant", "content": ""}]}:
            raise ValueError(f"{where} has an empty response, from which there is nothing to learn")
        case {"prompt": str(prompt), "response": str(response)}:
            return [{"role": "user", "content": prompt}], response, ended
        case {"messages": [*messages, {"role": "assistant", "content": str(response)}]}:
            return messages, response, ended
    raise ValueError(
        f"{where} needs prompt and response, or messages that end with the assistant's; "
        f"found {sorted(record) if isinstance(record, dict) else type(record).__name__}"
    )
