"""Training examples by number: tokenized conversations, their sources and their origin."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
from jinja2 import TemplateError

from outpace.api.rendering import render_chat
from outpace.checkpoints.fingerprint import Fingerprint
from outpace.data.generated import Problem, story, sudoku, table
from outpace.errors import OptionError, install_extra
from outpace.field_types import MAX_COUNT, Bounds, Count, Fraction, check_fields
from outpace.jsonl import JsonRecord, parse_record, read_lines
from outpace.models.config import ModelConfig
from outpace.tokenizer import Tokenizer

STORY_PREFIX, HUB_PREFIX = "story:", "hub:"
PROBLEM_GENERATORS = {
    STORY_PREFIX: story.story_problems,
    "sudoku:": sudoku.sudoku_problems,
    "table:": table.table_problems,
}
"""Problem generators by path prefix."""

AnsweredConversation = tuple[list[dict[str, str]], str, bool]
"""Messages, the answer to them, and whether the answer is complete."""

FieldNames = tuple[str, str]
"""Names of the prompt and response fields."""


@dataclass(slots=True)
class GeneratedProblems:
    """Endless generated problems."""

    generate: Callable[..., list[Problem]]
    size: None = None

    def record_number(self, number: int) -> int:
        """Return the number itself, since problems never repeat."""
        return number

    def read_record(self, record: int) -> tuple[str, AnsweredConversation]:
        (problem,) = self.generate(start=record)
        messages = [{"role": "user", "content": problem.question}]
        return f"problem {record}", (messages, problem.answer, True)


class ShuffledRecords:
    """Records in a new random order each epoch."""

    def __init__(
        self, records: JsonLinesFile | HubDataset, seed: int, fields: FieldNames | None
    ) -> None:
        self.records, self.seed, self.fields = records, seed, fields
        self.size = len(records)
        self.epoch_order = -1, np.arange(0)

    def record_number(self, number: int) -> int:
        """Return the record number of conversation number n, in its epoch's order."""
        epoch, place = divmod(number, self.size)
        if self.epoch_order[0] != epoch:
            shuffle = np.random.default_rng([self.seed, epoch, 1])
            self.epoch_order = epoch, shuffle.permutation(self.size)
        return int(self.epoch_order[1][place])

    def read_record(self, record: int) -> tuple[str, AnsweredConversation]:
        place = self.records.describe_location(record)
        return place, parse_conversation(self.records[record], place, self.fields)


class JsonLinesFile:
    """A JSON Lines file, in memory, read as files of prompts are."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"no data at {str(path)!r}; give a JSON Lines file, or story:train")
        self.lines = read_lines(path)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> JsonRecord:
        place, line = self.lines[number]
        return parse_record(line, place)

    def describe_location(self, number: int) -> str:
        return self.lines[number][0]


class HubDataset:
    """A Hugging Face data set: `owner/name`, `owner/name:config` or `owner/name:config:split`.

    The split defaults to `train`. The library `datasets` downloads and caches it.
    """

    def __init__(self, name: str) -> None:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError(f"{error}; a data set of the hub {install_extra('train')}") from error
        self.name = name
        repository, config, split = (*name.split(":"), "", "")[:3]
        try:
            self.rows = load_dataset(repository, config or None, split=split or "train")
        except Exception as error:  # the hub, its files and their readers raise any type
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"no data set at {HUB_PREFIX + name!r}: {reason}") from error
        if not len(self.rows):
            raise ValueError(f"{HUB_PREFIX + name!r} is empty; it needs at least one example")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number]

    def describe_location(self, number: int) -> str:
        return f"{HUB_PREFIX}{self.name}, row {number + 1}"


def open_source(
    path: str,
    seed: int,
    *,
    fields: FieldNames | None = None,
    plain: bool = False,
    split: str = "train",
) -> GeneratedProblems | ShuffledRecords:
    """Open the source of a path; generated problems use `split`, and `plain` for stories."""
    for kind, make in PROBLEM_GENERATORS.items():
        if path.startswith(kind):
            if path != f"{kind}{split}":
                purpose = "training" if split == "train" else "evaluation"
                raise ValueError(f"path {path!r} is not for {purpose}; use {kind}{split}")
            options = {"plain": plain} if kind == STORY_PREFIX else {}
            return GeneratedProblems(partial(make, split, 1, seed=seed, **options))
    if path.startswith(HUB_PREFIX):
        return ShuffledRecords(HubDataset(path.removeprefix(HUB_PREFIX)), seed, fields)
    return ShuffledRecords(JsonLinesFile(Path(path)), seed, fields)


def parse_conversation(
    record: Any, place: str, fields: FieldNames | None = None
) -> AnsweredConversation:
    ended = not isinstance(record, dict) or record.get("finish_reason") != "length"
    if fields is not None and isinstance(record, dict):
        record = dict(zip(("prompt", "response"), map(record.get, fields), strict=True))
    record = convert_record(record)
    match record:
        case {"response": ""} | {"messages": [*_, {"role": "assistant", "content": ""}]}:
            raise ValueError(f"{place} has an empty response; remove it")
        case {"prompt": str(prompt), "response": str(response)}:
            found: list[Any] = [{"role": "user", "content": prompt}]
        case {"messages": [*found, {"role": "assistant", "content": str(response)}]}:
            pass
        case _:
            raise ValueError(f"{place} {describe_missing(record, fields)}")
    for each in found:
        match each:
            case {"role": str(), "content": str(content)}:
                check_utf8(content, place)
            case _:
                raise ValueError(f"{place} needs messages with role and content, both texts")
    return found, check_utf8(response, place), ended


SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""Chat roles by their names in ShareGPT files; `system` is unchanged."""


def convert_record(record: Any) -> Any:
    """Convert a record in ShareGPT, Alpaca or plain-text format; others are returned unchanged."""
    match record:
        case {"conversations": [*turns]}:
            messages = [
                {
                    "role": SHAREGPT_ROLES.get(str(turn.get("from")), turn.get("from")),
                    "content": turn["value"],
                }
                if isinstance(turn, dict) and "value" in turn
                else turn
                for turn in turns
            ]
            return {"messages": messages}
        case {"instruction": str(instruction), "output": response, **rest}:
            text = rest.get("input")
            prompt = f"{instruction}\n\n{text}" if text else instruction
            return {"prompt": prompt, "response": response}
        case {"text": text, **rest} if not {"prompt", "response", "messages"} & {*rest}:
            return {"messages": [{"role": "assistant", "content": text}]}
    return record


def describe_missing(record: Any, fields: FieldNames | None) -> str:
    if fields is not None:
        return f"needs texts in {' and '.join(fields)}, as set by fields"
    found = sorted(record) if isinstance(record, dict) else type(record).__name__
    return (
        f"needs prompt and response, or messages that end with the assistant's; found {found}; "
        "set fields for other names"
    )


def check_utf8(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has a text that is not valid UTF-8: {error}") from error
    return text


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized example."""

    prompt: list[int]
    """Token ids of the prompt, not trained on."""
    response: list[int]
    """Token ids of the response, including its end token if it has one."""
    marks: list[bool]
    """For each response token, whether it overlaps a match of `Data.mark`."""
    ended: bool = True
    """Whether the response is complete; truncated ones are not."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Source and preparation of training examples."""

    path: str | tuple[str, ...]
    """A JSON Lines file of `{"prompt", "response"}` or `{"messages": [...]}`, or in ShareGPT,
    Alpaca or plain `{"text"}` format; a Hugging Face data set with such columns,
    `hub:owner/name:config:split`; generated problems, `story:train`, `sudoku:train` or
    `table:train`; or several of these. A response has no end token if its line has the
    `finish_reason` "length"."""
    fields: tuple[str, str] | None = None
    """Names of the prompt and response fields, if they differ."""
    turns: tuple[Count, ...] | None = None
    """Mixing ratio of several paths: examples of each per turn; 1 each by default."""
    drills: Fraction = 0.0
    """Fraction of stories replaced by a line of bare equations (`story:` only)."""
    plain: bool = False
    """Whether answers use the first wording of each sentence (`story:` only)."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    mark: str | None = None
    """A regular expression; response tokens that overlap a match are marked, so that an objective
    can weight them or start there."""
    end: str | None = None
    """The token that ends a response; the tokenizer's end-of-sequence by default."""
    longest: Annotated[int, Bounds(2, MAX_COUNT)] = 4096
    """Maximum tokens of an example; longer ones are truncated. Also limited by the model's length.
    """
    features: str | None = None
    """For a draft, a folder for the target's features of all examples, which are computed once and
    then read instead of being recomputed in each step."""
    other_target: bool = False
    """For a draft, whether answers may be those of another target with the same tokenizer and chat
    template."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.drills or self.plain) and not any(
            path.startswith(STORY_PREFIX) for path in self.paths
        ):
            raise ValueError(
                f"drills and plain need a path of {STORY_PREFIX}train, got {self.path!r}"
            )
        if len(self.turn_counts) != len(self.paths) or min(self.turn_counts, default=0) < 1:
            raise OptionError("turns", self.turns, "must be one count of at least 1 per path")
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
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def turn_counts(self) -> tuple[int, ...]:
        return (1,) * len(self.paths) if self.turns is None else self.turns


MAX_TOKEN_CHARACTERS = 256
"""Assumed maximum characters of a token: longer text is truncated before tokenization."""

MAX_SAMPLE_CHARACTERS = 200
"""Maximum length of a prompt that a run decodes as a sample."""


class Examples:
    """An endless stream of examples; number n is a function of the seed and n alone."""

    def __init__(
        self, data: Data, tokenizer: Tokenizer, seed: int = 0, split: str = "train"
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
        who, place = self.locate_example(number)
        rng = np.random.default_rng([self.seed, number, 0])
        drills = self.data.drills if self.data.paths[who].startswith(STORY_PREFIX) else 0.0
        if drills and rng.random() < drills:
            return self.build_example([], story.draw_drill(Random(int(rng.integers(1 << 62)))))
        return self.tokenize_chat(*self.conversation(who, place))

    def conversation(self, who: int, place: int) -> AnsweredConversation:
        """Return a conversation, given the index of its path and its number within that path."""
        source = self.sources[who]
        return source.read_record(source.record_number(place))[1]

    def locate_example(self, number: int) -> tuple[int, int]:
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

    def check_records(self) -> None:
        """Check all records; `ValueError` names the first invalid line."""
        checked_roles: set[tuple[str, ...]] = set()
        for each in self.sources:
            for place, (messages, _, _) in map(each.read_record, range(each.size or 0)):
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
        messages, _, _ = self.conversation(0, 0)
        text = messages[-1]["content"].strip() if messages else ""
        return text if 0 < len(text) <= MAX_SAMPLE_CHARACTERS and text.isprintable() else None

    def tokenize_chat(self, messages: list[dict[str, str]], answer: str, ended: bool) -> Example:
        """Tokenize a conversation, with the tokenizer's chat template if it has one.

        Plain text has no messages and is trained on from its first token.
        """
        if not messages:
            return self.build_example([], answer, ended=ended)
        text = self.render_messages(messages)[-MAX_TOKEN_CHARACTERS * self.data.longest :]
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return self.build_example(ids, answer, ended=ended)

    def render_messages(self, messages: list[dict[str, str]]) -> str:
        if self.tokenizer.chat_template is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return render_chat(self.tokenizer, messages, **self.data.template)
        except TemplateError as error:
            raise ValueError(f"the chat template rejects its messages: {error}") from error

    def build_example(self, prompt: list[int], answer: str, *, ended: bool = False) -> Example:
        widest = MAX_TOKEN_CHARACTERS * self.data.longest
        answer, ended = answer[:widest], ended and len(answer) <= widest
        response, offsets = self.tokenizer(answer, add_special_tokens=False)
        marks = [False] * len(response)
        if self.mark_pattern is not None:
            marks = marked_tokens(self.mark_pattern, answer, offsets)
        if ended:
            response, marks = [*response, self.end_token], [*marks, False]
        room = max(self.data.longest - len(prompt), 1)
        if len(response) > room:
            prompt, ended = prompt[-self.data.longest + 1 :], False
        return Example(prompt, response[:room], marks[:room], ended)


def limit_length(data: Data, models: Sequence[ModelConfig]) -> Data:
    return replace(data, longest=min(data.longest, *(model.max_length for model in models)))


def marked_tokens(
    mark: re.Pattern[str], text: str, offsets: Sequence[tuple[int, int]]
) -> list[bool]:
    spans = [match.span() for match in mark.finditer(text)]
    return [any(a < end and start < b for a, b in spans) for start, end in offsets]


def single_token_id(tokenizer: Tokenizer, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise ValueError(
            f"end must be a single token, but {text!r} is {len(ids)} tokens of this tokenizer"
        )
    return int(ids[0])


FINGERPRINT_FIELD = "fingerprint"
"""Field of a line that identifies the model that made it."""


def check_origin(examples: Examples, target: str) -> None:
    """Compare the fingerprint of each line that has one with that of a target, given by name."""
    data = examples.data
    expected: Fingerprint | None = None
    for source in examples.sources:
        if not (isinstance(source, ShuffledRecords) and isinstance(source.records, JsonLinesFile)):
            continue
        for number in range(len(source.records)):
            record = source.records[number]
            if FINGERPRINT_FIELD not in record:
                continue
            expected = expected or Fingerprint.of(target, examples.tokenizer, data.template)
            other = expected.differences(record[FINGERPRINT_FIELD])
            if data.other_target and "target" in other:
                other.remove("target")
            if other:
                place = source.records.describe_location(number)
                remedy = " or set data.other_target" if other == ["target"] else ""
                raise ValueError(
                    f"{place} was not made with this {' and '.join(other)}: answer the prompts by "
                    f"{target} with outpace data{remedy}"
                )
