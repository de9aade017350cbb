"""Training examples by number: JSON lines, or problems that the zoo makes up on the fly."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outpace.zoo import story

STORY = "story:"


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenised example.

    Attributes:
        prompt: Ids that are given.
        response: Ids to learn, the end token included where there is one.
        marks: Which response tokens stand between the marks of the data options.
        ended: Whether the response ends; a cut text does not.
    """

    prompt: list[int]
    response: list[int]
    marks: list[bool]
    ended: bool = True


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where examples come from.

    Attributes:
        path: A file of JSON lines, `{"prompt", "response"}` or `{"messages": [...]}`, or
            `story:train`, the problems of the zoo. A response does not end where its line has
            the `finish_reason` "length".
        drills: Share of examples replaced by a line of bare equations (`story:` only).
        plain: Whether answers take the first wording of each sentence (`story:` only).
        mark: A regular expression; the response tokens that it touches are marked, so that an
            objective can weigh them more or start there.
        longest: Examples are cut to this many tokens, or to what the model was made for.
    """

    path: str
    drills: float = 0.0
    plain: bool = False
    mark: str | None = None
    longest: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.drills <= 1:
            raise ValueError(f"drills is a share between 0 and 1, not {self.drills}")
        if (self.drills or self.plain) and not self.path.startswith(STORY):
            raise ValueError(
                f"drills belong to {STORY}train, as plain does; {self.path!r} has neither"
            )
        try:
            re.compile(self.mark or "")
        except re.error as error:
            raise ValueError(f"mark {self.mark!r} is no regular expression: {error}") from error
        if self.longest < 2:
            raise ValueError(f"longest must leave room for two tokens, not {self.longest}")


class Examples:
    """Example number n of an endless stream: a function of the seed and n alone."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        """Open the source; a missing or malformed one is refused here."""
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer names no end token; set its eos_token")
        self.data, self.tokenizer, self.seed = data, tokenizer, seed
        self.end = int(tokenizer.eos_token_id)
        self.mark = None if data.mark is None else re.compile(data.mark)
        self.split = self._story()
        self.lines = [] if self.split else _read(Path(data.path))
        self.order = -1, np.arange(0)
        self[0]

    def __getitem__(self, number: int) -> Example:
        """Tokenise one example."""
        rng = np.random.default_rng([self.seed, number, 0])
        if self.split is None:
            return self._line(number)
        if self.data.drills and rng.random() < self.data.drills:
            return self._example([], story.drill(Random(int(rng.integers(1 << 62)))))
        (problem,) = story.problems(
            self.split, 1, seed=self.seed, start=number, plain=self.data.plain
        )
        return self._chat([{"role": "user", "content": problem.question}], problem.answer, True)

    def _story(self) -> str | None:
        if not self.data.path.startswith(STORY):
            return None
        split = self.data.path.removeprefix(STORY)
        if split != "train":
            raise ValueError(f"{self.data.path!r} is not for training; use {STORY}train")
        return split

    def _line(self, number: int) -> Example:
        epoch, place = divmod(number, len(self.lines))
        if self.order[0] != epoch:
            shuffle = np.random.default_rng([self.seed, epoch, 1])
            self.order = epoch, shuffle.permutation(len(self.lines))
        line = int(self.order[1][place])
        return self._chat(*_conversation(self.lines[line], f"{self.data.path}:{line + 1}"))

    def _chat(self, messages: list[dict[str, str]], answer: str, ended: bool) -> Example:
        if self.tokenizer.chat_template is None:
            prompt = "\n".join(message["content"] for message in messages)
        else:
            prompt = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        return self._example(self._ids(prompt), answer, ended=ended)

    def _example(self, prompt: list[int], answer: str, *, ended: bool = False) -> Example:
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

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def touched(mark: re.Pattern[str], text: str, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens, given their places in a text, a regular expression touches."""
    spans = [match.span() for match in mark.finditer(text)]
    return [any(a < end and start < b for a, b in spans) for start, end in offsets]


def _read(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"no data at {str(path)!r}; give a file of JSON lines or story:train")
    lines = path.read_text(encoding="utf-8").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ValueError(f"{str(path)!r} is empty; it needs at least one example")
    return lines


def _conversation(line: str, where: str) -> tuple[list[dict[str, str]], str, bool]:
    """Messages of a line, the answer to them, and whether that is whole."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
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
