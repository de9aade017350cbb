"""What requests may say: OpenAI's fields, with a bound for every number, text and list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from reprlib import repr as brief
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from outpace.api.options import MOST_TOKENS, REQUEST
from outpace.errors import OptionError
from outpace.server.bounds import Bias, Name, Note, Strict, Text, bounded
from outpace.server.constrained import Constrained, at
from outpace.server.fault import Fault

CHOICES = 8
MOST_CHOICES = 64

Token = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Plain = Annotated[str, Field(max_length=256)] | int | float | bool | None
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1, max_length=MOST_TOKENS)]
Empty = Annotated[list[None], Field(max_length=0)]


class Extension(Strict):
    """What only this server knows."""

    method: Name | None = None
    options: Annotated[dict[Name, Plain], Field(max_length=64)] | None = None
    trace: bool | None = None
    provisional: bool | None = None
    fill: bool | None = None


class StreamOptions(Strict):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


TYPES: dict[str, Any] = {
    "stop": Stop | Annotated[list[Stop], Field(max_length=16)],
    "stop_ids": Annotated[list[Token], Field(max_length=64)],
    "logit_bias": Bias,
}
"""Types of options that have another form in JSON than in Python."""


def fields_of_options() -> Iterator[tuple[str, Any]]:
    """Fields of all requests that give an option each, with their types."""
    for option in REQUEST.values():
        if option.info.bounds is not None or option.name in TYPES:
            kind = TYPES.get(option.name) or bounded(option)
            yield option.fields[0], (kind | None, None)


if TYPE_CHECKING:
    Common = Constrained
else:
    Common = create_model("Common", __base__=Constrained, **dict(fields_of_options()))


class Asked(Common):
    """Fields that both kinds of requests have."""

    model: Name
    n: Annotated[int, Field(ge=1, le=CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    outpace: Extension | None = None

    # What clients send and what has no meaning here.
    user: Note | None = None

    @model_validator(mode="after")
    def check_stream(self) -> Self:
        """Options of a stream need one."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options: only a request with stream=true has them"
            raise OptionError("stream_options", self.stream_options, message)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options that are given, by their names; without constraints, which `rule` has."""
        plain = (each for each in REQUEST.values() if each.info.group != "rule")
        given = {option.name: at(self, field) for option in plain for field in option.fields}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def extension(self) -> Extension:
        """What only this server knows, or nothing."""
        return self.outpace or Extension()


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """A message of a conversation; `developer` is another word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]

    # Clients send the messages of the assistant back as they came.
    refusal: None = None
    tool_calls: Empty | None = None
    function_call: None = None
    audio: None = None
    annotations: Empty | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.text}


class ChatRequest(Asked):
    """A conversation that wants its next message."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1024)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    chat_template_kwargs: Annotated[dict[Name, Plain], Field(max_length=32)] | None = None

    # What clients send and what has no meaning here.
    metadata: Annotated[dict[Name, Note], Field(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: Note | None = None
    prompt_cache_key: Note | None = None
    parallel_tool_calls: bool | None = None

    # Not supported yet, except for values that ask for nothing.
    tools: Empty | None = None
    tool_choice: Literal["none"] | None = None
    functions: Empty | None = None
    function_call: Literal["none"] | None = None
    audio: None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def check_limit(self) -> Self:
        """One limit, under its old name or its new one."""
        older = self.options.get("max_tokens")
        if self.max_completion_tokens is not None and older is not None:
            message = "max_tokens: give max_completion_tokens or max_tokens, not both"
            raise OptionError("max_tokens", older, message)
        return self


def kind_of_prompt(prompt: object) -> str | None:
    """Return the tag of the type of `Prompts` that errors are to be about."""
    if not isinstance(prompt, list):
        return "str" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else None
    return "list[str]" if isinstance(first, str) else "list" if isinstance(first, list) else "int"


Several = Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)
Prompts = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[Tokens, Tag("int")]
    | Annotated[list[Text], Several, Tag("list[str]")]
    | Annotated[list[Tokens], Several, Tag("list")],
    Discriminator(
        kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message=f"Input should be text, token ids, or up to {MOST_CHOICES} of either",
    ),
]


class CompletionRequest(Asked):
    """Text, or several texts, to be continued as they stand."""

    prompt: Prompts
    logprobs: Literal[0] | None = None
    best_of: Annotated[int, Field(ge=1, le=CHOICES)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def check_counts(self) -> Self:
        """All choices are given back, and there are not too many."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = "best_of: other values than that of n are not supported yet"
            raise OptionError("best_of", self.best_of, message)
        if len(self.prompts) * (self.n or 1) > MOST_CHOICES:
            message = f"prompt: at most {MOST_CHOICES} choices, counting n for each prompt"
            raise OptionError("prompt", len(self.prompts), message)
        return self

    @property
    def prompts(self) -> list[Any]:
        """All prompts, if only one."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)


TOOLS = "calling tools is not supported yet"
NOT_YET = {
    "not supported yet": (
        *("audio", "prediction", "reasoning_effort", "verbosity", "suffix", "echo", "best_of"),
        *("web_search_options", "top_logprobs", "refusal"),
    ),
    TOOLS: ("tools", "tool_choice", "tool_calls", "functions", "function_call"),
    "only text is supported": ("modalities",),
}
REFUSED = {name: reason for reason, names in NOT_YET.items() for name in names}
"""Fields of OpenAI's of which some values are refused, and the refusal."""

Request = TypeVar("Request", bound=BaseModel)
TAG = re.compile(r"str|int|float|bool|none|\[key\]|(list|dict|constrained-|function-|literal).*")


STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
SMALL = 2**16
"""Bytes of a body that is read in no time, whatever is in it."""

COUNTS = {"values": (b",", 2**18), "lists and objects": (b"[{", 2**14), "fields": (b":", 2**14)}
"""What a body may have at most, and the bytes that count it where they stand in no text."""


def check_shape(body: bytes) -> None:
    """Raise `Fault` for a body of so many parts that reading it would hold up everybody else."""
    if len(body) <= SMALL:
        return
    plain = STRING.sub(b"", body)
    for what, (marks, most) in COUNTS.items():
        if sum(plain.count(mark) for mark in marks) > most:
            raise Fault(400, f"the body has more than {most} {what}", code="too_many_values")


def parse(kind: type[Request], body: bytes) -> Request:
    """A request from its JSON; `Fault` with the path of the field that is wrong."""
    check_shape(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise fault(error) from None


def fault(error: ValidationError) -> Fault:
    """The first thing that is wrong, said of the deepest field where several types are allowed.

    What is not supported goes first: other fields may be wrong only because of it.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return Fault(400, f"the body is no JSON that can be read: {first['msg']}")
    alike = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
    place = max(map(path, alike), key=lambda place: (unsupported(place) is not None, len(place)))
    alike = [each for each in alike if path(each) == place]
    # Where one of the types fits, only what else is wrong with it is of interest.
    worst = [each for each in alike if not each["type"].endswith("_type")] or alike
    message = " or ".join(dict.fromkeys(map(message_of, worst)))
    raised = first.get("ctx", {}).get("error")
    if not place and isinstance(raised, OptionError):  # by a check of the whole request
        return Fault(400, str(raised), param=raised.param)
    if not place:
        return Fault(400, "the body must be an object of JSON")
    if (end := unsupported(place)) is not None:
        place = place[: end + 1]
    param = ".".join(map(str, place))
    return Fault(400, f"{param}: {describe(place, worst[0], message)}", param=param)


def unsupported(place: tuple[str | int, ...]) -> int | None:
    """Where on a path a field is of which some values are refused; None where none is."""
    depth = 2 if place[:1] == ("messages",) else 0
    step = place[depth] if len(place) > depth else None
    return depth if step in REFUSED or (depth and step == "role") else None


def message_of(error: Any) -> str:
    """The words of pydantic, but for the length of a list."""
    bounds = {"too_long": "at most {max_length}", "too_short": "at least {min_length}"}
    if (bound := bounds.get(error["type"])) is None:
        return str(error["msg"])
    count = error["ctx"]["actual_length"]
    found = "more" if count is None else count  # pydantic does not count the fields of an object
    return f"must have {bound.format(**error['ctx'])} entries, not {found}"


def describe(place: tuple[str | int, ...], error: Any, message: str) -> str:
    """What is wrong with a field."""
    if error["type"] == "extra_forbidden":
        return "unknown field"
    if error["type"] == "missing":
        return "is needed"
    if unsupported(place) is not None and place[-1] in REFUSED:
        return f"{REFUSED[str(place[-1])]}; leave the field out"
    if place[-1] == "role" and error["input"] in ("tool", "function"):
        return f"{error['input']!r}: {TOOLS}; leave such messages out"
    if place[-1] == "type":
        return f"{brief(error['input'])} is not supported yet"
    plain = message.removeprefix("Value error, ").replace("Input should", "must")
    if error["type"] in ("too_long", "too_short"):
        return plain
    return f"{plain}, not {brief(error['input'])}"


def path(error: Any) -> tuple[str | int, ...]:
    """Where an error is, without the types that were tried there."""
    place = error["loc"]
    inner = place[:-1] if error["type"] in ("extra_forbidden", "missing") else place
    kept = tuple(step for step in inner if isinstance(step, int) or not TAG.fullmatch(step))
    return kept + place[len(inner) :]
