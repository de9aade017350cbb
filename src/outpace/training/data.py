"""Training examples by number: tokenized conversations."""

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
from outpace.training.field_types import MAX_COUNT, Bounds, Count, Fraction, check_bounds
from outpace.training.sources import STORY_PREFIX, AnsweredConversation, open_source


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized example.

    Attributes:
        prompt: token ids of the prompt, not trained on.
        response: token ids of the response, including its end token if it has one.
        marks: for each response token, whether it overlaps a match of `Data.mark`.
        ended: whether the response is complete; truncated ones are not.
    """

    prompt: list[int]
    response: list[int]
    marks: list[bool]
    ended: bool = True

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Source and preparation of training examples.

    Attributes:
        path: a JSON Lines file of `{"prompt", "response"}` or `{"messages": [...]}`, or in
            ShareGPT, Alpaca or plain `{"text"}` format; a Hugging Face data set with such columns,
            `hub:owner/name:config:split`; generated problems, `story:train`, `sudoku:train` or
            `table:train`; or several of these. A response has no end token if its line has the
            `finish_reason` "length".
        fields: names of the prompt and response fields, if they differ.
        turns: mixing ratio of several paths: examples of each per turn; 1 each by default.
        drills: fraction of stories replaced by a line of bare equations (`story:` only).
        plain: whether answers use the first wording of each sentence (`story:` only).
        template: variables of the chat template, such as `enable_thinking`.
        mark: a regular expression; response tokens that overlap a match are marked, so that an
            objective can weight them or start there.
        end: the token that ends a response; the tokenizer's end-of-sequence by default.
        longest: maximum tokens of an example; longer ones are truncated. Also limited by the
            model's length.
        features: for a draft, a folder for the target's features of all examples, which are
            computed once and then read instead of being recomputed in each step.
        other_target: for a draft, whether answers may be those of another target with the same
            tokenizer and chat template.
    """

    path: str | tuple[str, ...]
    fields: tuple[str, str] | None = None
    turns: tuple[Count, ...] | None = None
    drills: Fraction = 0.0
    plain: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    mark: str | None = None
    end: str | None = None
    longest: Annotated[int, Bounds(2, MAX_COUNT)] = 4096
    features: str | None = None
    other_target: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if (self.drills or self.plain) and not any(
            path.startswith(STORY_PREFIX) for path in self.paths
        ):
            raise ValueError(
                f"drills and plain need a path of {STORY_PREFIX}train, got {self.path!r}"
            )
        if len(self.turn_counts) != len(self.paths) or min(self.turn_counts, default=0) < 1:
            raise ValueError(f"turns must be one count of at least 1 per path, got {self.turns}")
        try:
            re.compile(self.mark or "")
        except re.error as error:
            raise ValueError(
                f"mark {self.mark!r} is not a valid regular expression: {error}"
            ) from error
        if self.features is not None and not self.features.strip():
            raise ValueError("features must be the name of a folder, not empty")

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def turn_counts(self) -> tuple[int, ...]:
        """Examples of each path per turn."""
        return (1,) * len(self.paths) if self.turns is None else self.turns


MAX_TOKEN_CHARACTERS = 256
"""Assumed maximum characters of a token: longer text is truncated before tokenization."""

MAX_SAMPLE_CHARACTERS = 200
"""Maximum length of a prompt that a run decodes as a sample."""

LineProgress = Callable[
    [Iterable[tuple[str, AnsweredConversation]], int], Iterable[tuple[str, AnsweredConversation]]
]
"""Wraps an iterable of this many lines, to show progress."""


class Examples:
    """An endless stream of examples; number n is a function of the seed and n alone."""

    def __init__(
        self, data: Data, tokenizer: PreTrainedTokenizerBase, seed: int = 0, split: str = "train"
    ) -> None:
        """Open the sources; `ValueError` if one is missing or malformed."""
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token; set its eos_token")
        self.data, self.tokenizer, self.seed = data, tokenizer, seed
        self.end_token = int(tokenizer.eos_token_id)
        if data.end is not None:
            self.end_token = single_token_id(tokenizer, data.end)
        self.mark_pattern = None if data.mark is None else re.compile(data.mark)
        self.sources = [
            open_source(path, seed, fields=data.fields, plain=data.plain, split=split)
            for path in data.paths
        ]
        # For each example of a turn: the index of its path, and its number within that path.
        self.turn_slots = [
            (who, place) for who, n in enumerate(data.turn_counts) for place in range(n)
        ]
        for number in range(len(self.turn_slots)):
            self[number]

    def __getitem__(self, number: int) -> Example:
        """Return example number n."""
        who, place = self.locate_example(number)
        rng = np.random.default_rng([self.seed, number, 0])
        drills = self.data.drills if self.data.paths[who].startswith(STORY_PREFIX) else 0.0
        if drills and rng.random() < drills:
            return self.build_example([], story.draw_drill(Random(int(rng.integers(1 << 62)))))
        return self.tokenize_chat(*self.sources[who](place))

    def locate_example(self, number: int) -> tuple[int, int]:
        """Return the index of an example's path, and its number within that path."""
        turn, place = divmod(number, len(self.turn_slots))
        who, place = self.turn_slots[place]
        return who, place + turn * self.data.turn_counts[who]

    @property
    def record_count(self) -> int | None:
        """Number of records in all paths; None if one of them is endless."""
        sizes = [each.size for each in self.sources if each.size is not None]
        return sum(sizes) if len(sizes) == len(self.sources) else None

    def record_number(self, number: int) -> int:
        """Return an example's record number, counted over all paths; none may be endless."""
        who, place = self.locate_example(number)
        return sum(each.size or 0 for each in self.sources[:who]) + self.sources[who].record_number(
            place
        )

    def read_record(self, record: int) -> Example:
        """Tokenize a record, given its number over all paths."""
        return self.tokenize_chat(*self.read_conversation(record))

    def read_conversation(self, record: int) -> AnsweredConversation:
        """Return the conversation of a record, given its number over all paths."""
        for each in self.sources:
            if record < (size := each.size or 0):
                return each.read_record(record)[1]
            record -= size
        raise AssertionError("record number out of range")

    @property
    def epoch_size(self) -> int | None:
        """Number of examples after which every record was used; None if no path repeats."""
        turns = [
            -(-each.size // count) if each.size else 0
            for each, count in zip(self.sources, self.data.turn_counts, strict=True)
        ]
        return max(turns) * len(self.turn_slots) or None

    def check_records(self, progress: LineProgress = lambda lines, count: lines) -> None:
        """Check all records; `ValueError` names the first invalid line.

        `progress` wraps the lines of each source, given with their number.
        """
        checked_roles: set[tuple[str, ...]] = set()
        for each in self.sources:
            for place, (messages, _, _) in progress(each.iterate_records(), each.size or 0):
                # Chat templates reject roles or their order, never the content.
                roles = tuple(message["role"] for message in messages)
                if roles and roles not in checked_roles:
                    try:
                        self.render_messages(messages)
                    except ValueError as error:
                        raise ValueError(f"{place}: {error}") from error
                    checked_roles.add(roles)

    def first_question(self) -> str | None:
        """Return the first example's last message if it is a short, printable line."""
        messages, _, _ = self.sources[0](0)
        text = messages[-1]["content"].strip() if messages else ""
        return text if 0 < len(text) <= MAX_SAMPLE_CHARACTERS and text.isprintable() else None

    def tokenize_chat(self, messages: list[dict[str, str]], answer: str, ended: bool) -> Example:
        """Tokenize a conversation, with the tokenizer's chat template if it has one.

        Plain text has no messages and is trained on from its first token.
        """
        if not messages:
            return self.build_example([], answer, ended=ended)
        text = self.render_messages(messages)[-MAX_TOKEN_CHARACTERS * self.data.longest :]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.build_example(list(ids), answer, ended=ended)

    def render_messages(self, messages: list[dict[str, str]]) -> str:
        """Render messages as one text; `ValueError` if the chat template rejects them."""
        if self.tokenizer.chat_template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self.data.template
                )
            )
        except TemplateError as error:
            raise ValueError(f"the chat template rejects its messages: {error}") from error

    def build_example(self, prompt: list[int], answer: str, *, ended: bool = False) -> Example:
        """Tokenize the answer, and truncate prompt and answer to the maximum length."""
        widest = MAX_TOKEN_CHARACTERS * self.data.longest
        answer, ended = answer[:widest], ended and len(answer) <= widest
        encoded = self.tokenizer(
            answer, add_special_tokens=False, return_offsets_mapping=self.mark_pattern is not None
        )
        response = list(encoded["input_ids"])
        marks = [False] * len(response)
        if self.mark_pattern is not None:
            marks = marked_tokens(self.mark_pattern, answer, encoded["offset_mapping"])
        if ended:
            response, marks = [*response, self.end_token], [*marks, False]
        room = max(self.data.longest - len(prompt), 1)
        if len(response) > room:
            prompt, ended = prompt[-self.data.longest + 1 :], False
        return Example(prompt, response[:room], marks[:room], ended)


def limit_length(data: Data, models: Sequence[ModelConfig]) -> Data:
    """Lower `longest` to the smallest maximum length of the models."""
    return replace(data, longest=min(data.longest, *(model.max_length for model in models)))


def marked_tokens(
    mark: re.Pattern[str], text: str, offsets: Sequence[tuple[int, int]]
) -> list[bool]:
    """Return which tokens, given by their character spans, overlap a match."""
    spans = [match.span() for match in mark.finditer(text)]
    return [any(a < end and start < b for a, b in spans) for start, end in offsets]


def single_token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the id of the single token that a string encodes to."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(
            f"end must be a single token, but {text!r} is {len(ids)} tokens of this tokenizer"
        )
    return int(ids[0])
