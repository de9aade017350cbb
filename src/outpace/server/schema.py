"""Request schemas: OpenAI's fields, with a bound for every number, text and list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from outpace.api.option_checks import EFFORTS, MAX_TOP_LOGPROBS
from outpace.api.options import MAX_ANSWER_TOKENS, REQUEST_OPTIONS, option_names
from outpace.api.tools import link_calls, read_tool_use
from outpace.errors import OptionError
from outpace.server.bounds import BoundedText, LogitBias, Name, ShortText, StrictModel, bounded_type
from outpace.server.constraint_fields import ConstraintFields, get_field
from outpace.server.tool_fields import Calls, NamedChoice, ToolChoice, Tools, dotted_error

MAX_CHOICES_PER_PROMPT = 8
MAX_CHOICES = 64

BoundedTokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
JsonScalar = Annotated[str, Field(max_length=256)] | int | float | bool | None
BoundedTokenIds = Annotated[
    list[BoundedTokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWER_TOKENS)
]
EmptyList = Annotated[list[None], Field(max_length=0)]


TopCount = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class MethodExtension(StrictModel):
    """The decoding method, a choice specific to outpace."""

    method: Name | None = None
    options: Annotated[dict[Name, JsonScalar], Field(max_length=64)] | None = None


class Extension(MethodExtension):
    """Fields specific to outpace."""

    trace: bool | None = None
    provisional: bool | None = None
    fill: bool | None = None


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


JSON_TYPES: dict[str, Any] = {
    "stop": StopString | Annotated[list[StopString], Field(max_length=16)],
    "stop_ids": Annotated[list[BoundedTokenId], Field(max_length=64)],
    "logit_bias": LogitBias,
    "reasoning_effort": Literal[EFFORTS],
}
"""Types of options whose JSON form differs from the Python form."""


def request_option_fields() -> Iterator[tuple[str, Any]]:
    """Yield the request fields that set one option each, with their types."""
    for option in REQUEST_OPTIONS.values():
        if option.info.bounds is not None or option.name in JSON_TYPES:
            kind = JSON_TYPES.get(option.name) or bounded_type(option)
            yield option.fields[0], (kind | None, None)


if TYPE_CHECKING:
    OptionFields = ConstraintFields
else:
    OptionFields = create_model(
        "OptionFields", __base__=ConstraintFields, **dict(request_option_fields())
    )


class BaseRequest(OptionFields):
    """Fields common to both kinds of requests."""

    model: Name
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    outpace: Extension | None = None

    # Accepted from clients and ignored.
    user: ShortText | None = None

    @model_validator(mode="after")
    def check_stream(self) -> Self:
        """Reject stream options without `stream`, and fields that streams do not have."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options: requires stream=true"
            raise OptionError("stream_options", self.stream_options, message)
        for name, is_set in {"stream": self.stream, "outpace.fill": self.extension.fill}.items():
            if is_set and (count := get_field(self, "prompt_logprobs")) is not None:
                message = f"prompt_logprobs: cannot be combined with {name}; set one"
                raise OptionError("prompt_logprobs", count, message)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, by name, except constraints (see `constraint`)."""
        unconstrained = (
            option_info
            for option_info in REQUEST_OPTIONS.values()
            if option_info.info.group != "rule"
        )
        values = {
            option.name: get_field(self, field)
            for option in unconstrained
            for field in option.fields
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def extension(self) -> Extension:
        """Fields specific to outpace, or their defaults."""
        return self.outpace or Extension()


class TextPart(StrictModel):
    """A text part of a message."""

    type: Literal["text"]
    text: BoundedText


MessageParts = Annotated[list[TextPart], Field(min_length=1, max_length=1024)]


class Message(StrictModel):
    """A message of a conversation; `developer` is a synonym of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: BoundedText | MessageParts | None = None
    reasoning_content: BoundedText | None = None
    tool_calls: Calls | None = None
    tool_call_id: Name | None = None

    # Clients return the assistant's messages unchanged.
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: EmptyList | None = None

    # Accepted from clients and ignored.
    name: Name | None = None

    @property
    def text(self) -> str:
        """The text of all parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())

    def template_message(self) -> dict[str, Any]:
        """Return the message as input to a chat template."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})

    def check_fields(self, param: str) -> None:
        """Raise `OptionError` for a field that is missing, or does not belong to the role."""
        required = {
            "content": not (self.role == "assistant" and self.tool_calls),
            "tool_call_id": self.role == "tool",
        }
        for name, is_required in required.items():
            if is_required and getattr(self, name) is None:
                field = f"{param}.{name}"
                raise OptionError(field, None, f"{field}: is required in a message of {self.role}")
        roles = {"tool_call_id": "tool", "name": "tool"}
        roles |= dict.fromkeys(("tool_calls", "reasoning_content"), "assistant")
        for name, role in roles.items():
            if getattr(self, name) and self.role != role:
                field = f"{param}.{name}"
                raise OptionError(field, None, f"{field}: only messages of {role} may have it")


class ChatRequest(BaseRequest):
    """A conversation to be continued with the next message."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1024)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_ANSWER_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    chat_template_kwargs: Annotated[dict[Name, JsonScalar], Field(max_length=32)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Accepted from clients and ignored.
    metadata: Annotated[dict[Name, ShortText], Field(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None

    # Not supported yet, except for values that disable the feature.
    functions: EmptyList | None = None
    function_call: Literal["none"] | None = None
    audio: None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    prediction: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def check_limit(self) -> Self:
        """Reject both names of the same limit."""
        older = self.options.get("max_tokens")
        if self.max_completion_tokens is not None and older is not None:
            message = "max_tokens: cannot be combined with max_completion_tokens"
            raise OptionError("max_tokens", older, message)
        return self

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        """Reject a number of tokens without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs: requires logprobs=true"
            raise OptionError("top_logprobs", self.top_logprobs, message)
        return self

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        """Check the tools, the choice among them, and calls and results in the conversation."""
        for number, message in enumerate(self.messages):
            message.check_fields(f"messages.{number}")
        try:
            link_calls([message.template_message() for message in self.messages])
            self.build_tool_options()
        except OptionError as error:
            raise dotted_error(error) from None
        return self

    def build_tool_options(self) -> dict[str, Any]:
        """Return options of the library for tools; empty if the answer calls none."""
        tools = [tool.model_dump() for tool in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedChoice):
            choice = choice.model_dump()
        parallel = self.parallel_tool_calls
        if read_tool_use(tools, choice, parallel) is None:
            return {}
        return dict(zip(option_names("calls"), (tools, choice, parallel), strict=True))


def prompt_type_tag(prompt: object) -> str | None:
    """Return the tag of the prompt type that errors should refer to."""
    if not isinstance(prompt, list):
        return "str" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else None
    return "list[str]" if isinstance(first, str) else "list" if isinstance(first, list) else "int"


PROMPT_LIST = Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)
PromptInput = Annotated[
    Annotated[BoundedText, Tag("str")]
    | Annotated[BoundedTokenIds, Tag("int")]
    | Annotated[list[BoundedText], PROMPT_LIST, Tag("list[str]")]
    | Annotated[list[BoundedTokenIds], PROMPT_LIST, Tag("list")],
    Discriminator(
        prompt_type_tag,
        custom_error_type="prompt_type",
        custom_error_message=f"Input should be text, token ids, or up to {MAX_CHOICES} of either",
    ),
]


class CompletionRequest(BaseRequest):
    """One or several strings to be continued."""

    prompt: PromptInput
    logprobs: TopCount | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)] | None = None
    suffix: BoundedText | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def check_counts(self) -> Self:
        """Check `best_of` and the number of choices."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = "best_of: must equal n; other values are not supported"
            raise OptionError("best_of", self.best_of, message)
        if self.suffix is not None:
            self.check_suffix()
        self.check_echo()
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            message = f"prompt: at most {MAX_CHOICES} choices (n per prompt) are allowed"
            raise OptionError("prompt", len(self.prompts), message)
        return self

    def check_suffix(self) -> None:
        """Raise `OptionError` for prompts and fields that cannot precede a suffix."""
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            message = "prompt: must be text with suffix, got token ids"
            raise OptionError("prompt", self.prompt, message)
        if self.extension.fill:
            message = "suffix: cannot be combined with outpace.fill; set one"
            raise OptionError("suffix", self.suffix, message)

    @property
    def echoes_scores(self) -> bool:
        """Whether the answer has the log-probabilities of the prompt before its own."""
        return bool(self.echo) and self.logprobs is not None

    def check_echo(self) -> None:
        """Raise `OptionError` for fields with which the prompt cannot precede the answer."""
        conflicts = {
            "suffix": self.suffix is not None,
            "outpace.fill": self.extension.fill,
            "prompt_logprobs": self.echoes_scores
            and get_field(self, "prompt_logprobs") is not None,
        }
        for name, is_set in conflicts.items():
            if self.echo and is_set:
                message = f"echo: cannot be combined with {name}; set one"
                raise OptionError("echo", self.echo, message)

    @property
    def prompts(self) -> list[Any]:
        """The prompts as a list."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else list(self.prompt)
