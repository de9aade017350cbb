"""Training examples by number: conversations, tokenised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Annotated, Any

import numpy as np
from jinja2 import TemplateError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outpace.evaluation.generated import story
from outpace.models.config import ModelConfig
from outpace.training.kinds import MOST_COUNT, Bounds, Count, Share, check_bounds
from outpace.training.sources import STORY, Conversation, source


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

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where examples come from.

    Attributes:
        path: a file of JSON lines, `{"prompt", "response"}` or `{"messages": [...]}`, or as those
            of ShareGPT, Alpaca or plain `{"text"}`; a data set of the hub with such columns,
            `hub:owner/name:config:split`; problems of the zoo, `story:train`, `sudoku:train` or
            `table:train`; or several of these. A response does not end where its line has the
            `finish_reason` "length".
        fields: what prompt and response are called in files and data sets that name them otherwise.
        turns: how many examples each of several paths gives before the next one does; 1 each.
        drills: share of stories replaced by a line of bare equations (`story:` only).
        plain: whether answers take the first wording of each sentence (`story:` only).
        template: variables of the chat template, such as `enable_thinking`.
        mark: a regular expression; the response tokens that it touches are marked, so that an
            objective can weigh them more or start there.
        end: the token that ends a response; the tokenizer's end-of-sequence by default.
        longest: examples are cut to this many tokens, or to what the model was made for.
        features: a folder for what a target makes of all examples, which is computed once and then
            read, instead of in each step; for a draft.
    """

    path: str | tuple[str, ...]
    fields: tuple[str, str] | None = None
    turns: tuple[Count, ...] | None = None
    drills: Share = 0.0
    plain: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    mark: str | None = None
    end: str | None = None
    longest: Annotated[int, Bounds(2, MOST_COUNT)] = 4096
    features: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
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
        if self.features is not None and not self.features.strip():
            raise ValueError("features must be the name of a folder, not empty")

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths, be they one or more."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def counts(self) -> tuple[int, ...]:
        """Examples of each path in one turn of all."""
        return (1,) * len(self.paths) if self.turns is None else self.turns


WIDEST = 256
"""Characters of a token at most: what is certain to be cut is cut before it is tokenised."""

Watch = Callable[[Iterable[tuple[str, Conversation]], int], Iterable[tuple[str, Conversation]]]
"""Looks on while so many lines go by."""


class Examples:
    """Example number n of an endless stream: a function of the seed and n alone."""

    def __init__(
        self, data: Data, tokenizer: PreTrainedTokenizerBase, seed: int = 0, split: str = "train"
    ) -> None:
        """Open the sources; a missing or malformed one is refused here."""
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer names no end token; set its eos_token")
        self.data, self.tokenizer, self.seed = data, tokenizer, seed
        self.end = int(tokenizer.eos_token_id)
        if data.end is not None:
            self.end = only_token(tokenizer, data.end)
        self.mark = None if data.mark is None else re.compile(data.mark)
        self.sources = [
            source(path, seed, fields=data.fields, plain=data.plain, split=split)
            for path in data.paths
        ]
        # Of each example in a turn: its path, and its number among those of this path.
        self.turn = [(who, place) for who, n in enumerate(data.counts) for place in range(n)]
        for number in range(len(self.turn)):
            self[number]

    def __getitem__(self, number: int) -> Example:
        """Tokenise one example."""
        who, place = self.place(number)
        rng = np.random.default_rng([self.seed, number, 0])
        drills = self.data.drills if self.data.paths[who].startswith(STORY) else 0.0
        if drills and rng.random() < drills:
            return self.example([], story.drill(Random(int(rng.integers(1 << 62)))))
        return self.chat(*self.sources[who](place))

    def place(self, number: int) -> tuple[int, int]:
        """The path that an example is of, and its number among those of this path."""
        turn, place = divmod(number, len(self.turn))
        who, place = self.turn[place]
        return who, place + turn * self.data.counts[who]

    @property
    def records(self) -> int | None:
        """How many there are in all paths; None where one of them has no end."""
        sizes = [each.size for each in self.sources if each.size is not None]
        return sum(sizes) if len(sizes) == len(self.sources) else None

    def record(self, number: int) -> int:
        """The record that an example is of, counted through all paths; none may be endless."""
        who, place = self.place(number)
        return sum(each.size or 0 for each in self.sources[:who]) + self.sources[who].record(place)

    def read(self, record: int) -> Example:
        """Tokenise a record, counted through all paths."""
        for each in self.sources:
            if record < (size := each.size or 0):
                return self.chat(*each.read(record)[1])
            record -= size
        raise AssertionError("no path has that record")

    @property
    def epoch(self) -> int | None:
        """Examples until every line was there once; None where none repeats."""
        turns = [
            -(-each.size // count) if each.size else 0
            for each, count in zip(self.sources, self.data.counts, strict=True)
        ]
        return max(turns) * len(self.turn) or None

    def check(self, watched: Watch = lambda places, count: places) -> None:
        """Look at all that there is; `ValueError` that names the first line that is none.

        `watched` is handed the lines and their number, and gives them on.
        """
        known: set[tuple[str, ...]] = set()
        for each in self.sources:
            for place, (messages, _, _) in watched(each.all(), each.size or 0):
                # Templates refuse roles and their order; what is said makes no difference.
                roles = tuple(message["role"] for message in messages)
                if roles and roles not in known:
                    try:
                        self.rendered(messages)
                    except ValueError as error:
                        raise ValueError(f"{place}: {error}") from error
                    known.add(roles)

    def question(self, longest: int = 200) -> str | None:
        """What the first example asks, where that is a short line of its user."""
        messages, _, _ = self.sources[0](0)
        text = messages[-1]["content"].strip() if messages else ""
        return text if 0 < len(text) <= longest and text.isprintable() else None

    def chat(self, messages: list[dict[str, str]], answer: str, ended: bool) -> Example:
        """Tokenise a conversation, by the tokenizer's chat template where it has one.

        Text that is no conversation has no messages, and is learnt from its first token on.
        """
        if not messages:
            return self.example([], answer, ended=ended)
        text = self.rendered(messages)[-WIDEST * self.data.longest :]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.example(list(ids), answer, ended=ended)

    def rendered(self, messages: list[dict[str, str]]) -> str:
        """Messages as one text; `ValueError` where the chat template has no place for them."""
        if self.tokenizer.chat_template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self.data.template
                )
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses its messages: {error}") from error

    def example(self, prompt: list[int], answer: str, *, ended: bool = False) -> Example:
        """Tokens of prompt and answer, cut where they are too long."""
        widest = WIDEST * self.data.longest
        answer, ended = answer[:widest], ended and len(answer) <= widest
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


def cut_data(data: Data, models: Sequence[ModelConfig]) -> Data:
    """The data without what is longer than one of the models was made for."""
    return replace(data, longest=min(data.longest, *(model.max_length for model in models)))


def touched(mark: re.Pattern[str], text: str, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens, given their places in a text, a regular expression touches."""
    spans = [match.span() for match in mark.finditer(text)]
    return [any(a < end and start < b for a, b in spans) for start, end in offsets]


def only_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The token that a text is."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"end {text!r} is {len(ids)} tokens of this tokenizer; name one token")
    return int(ids[0])
