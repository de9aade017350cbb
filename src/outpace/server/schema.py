"""Request schemas: OpenAI's fields, with a bound for every number, text and list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, Self, Unpack

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)

from outpace.api.options import (
    EFFORTS,
    MAX_ANSWER_TOKENS,
    MAX_TOP_LOGPROBS,
    REQUEST_OPTIONS,
    Options,
    RequestOptions,
    option_fields,
    option_info,
)
from outpace.api.tools import FUNCTION_NAME, MAX_TOOLS
from outpace.constraint.calls import MAX_CALLS
from outpace.constraint.pattern import MAX_PATTERN_LENGTH
from outpace.constraint.schema import MAX_SCHEMA_DEPTH
from outpace.errors import OptionError
from outpace.field_types import MAX_COUNT, Bounds
from outpace.server.option_types import Whole, bounded_type

MAX_BODY_BYTES = 2 * 2**20
"""Maximum size of a request body in bytes."""

BoundedText = Annotated[str, Field(max_length=MAX_BODY_BYTES)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ShortText = Annotated[str, Field(max_length=512)]


class StrictModel(BaseModel):
    """Model with exact types, no unknown fields and finite numbers only."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class OpenModel(StrictModel):
    """Part of a conversation, whose unknown fields are ignored: they cannot change its text."""

    model_config = ConfigDict(extra="ignore")


class ProviderTool(OpenModel):
    """A tool that a provider's servers run, or that models of the provider support.

    No model here calls it, so it is left out.
    """

    type: Name


def read_type(value: object) -> Any:
    """Return the field `type` of an object or a model; None without one."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


class OtherPart(OpenModel):
    """Part of a tool's result that is no text, such as an image; a note replaces it."""

    type: Name
    tool_name: Name | None = None
    """The tool that a search for tools has found."""

    @property
    def text(self) -> str:
        """The note."""
        return self.tool_name or f"[{self.type}: left out, since the model reads only text]"


class HasText(Protocol):
    """Any part of a content."""

    @property
    def text(self) -> str: ...


def join_texts(content: str | Sequence[HasText] | None) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def result_part_tag(part: object) -> str:
    """Return the tag of a part of a tool's result."""
    kind = read_type(part)
    return "dict-other" if isinstance(kind, str) and not kind.endswith("text") else "dict-text"


def require_content(content: object, info: ValidationInfo) -> object:
    """Reject a message without a content, unless it is the assistant's: its turn may be empty."""
    role = info.data.get("role", "assistant")  # without a valid role, that is the error
    if content is None and role != "assistant":
        raise ValueError(f"is required in a message of {role}")
    return content


ContentRule = AfterValidator(require_content), Field(validate_default=True)
"""Validators of the content of a message, after its role."""


def disable_top_k(value: object) -> object:
    """Return the `top_k` that excludes no token for 0 and -1, by which other servers disable it."""
    return MAX_COUNT if value in (0, -1) and not isinstance(value, bool) else value


def read_limit(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return a limit of tokens; None for -1, by which clients request none."""
    return None if value == -1 and not isinstance(value, bool) else validate(value)


AnswerLength = Annotated[Whole, Field(ge=1, le=MAX_ANSWER_TOKENS), WrapValidator(read_limit)]
"""Maximum number of tokens of an answer."""


MAX_LOGIT_BIASES = 1024
"""Maximum number of tokens in a `logit_bias`."""


def check_biases(biases: object) -> object:
    """Reject too many biases before each is validated, which is slow."""
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(f"must have at most {MAX_LOGIT_BIASES} entries, got {len(biases)}")
    return biases


LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES),
    BeforeValidator(check_biases),
    AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
]


MAX_CHOICE_TEXTS = 4096
"""Maximum number of alternatives in `choice`."""


def parse_schema(text: str) -> dict[str, Any]:
    """Return the JSON schema contained in a string."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise ValueError(
            f"it is too large: it is nested more than {MAX_SCHEMA_DEPTH} deep"
        ) from error
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON object")
    return schema


JsonObject = dict[str, Any]
SchemaOrText = (
    JsonObject | Annotated[str, Field(max_length=MAX_PATTERN_LENGTH), AfterValidator(parse_schema)]
)
ChoiceTexts = Annotated[
    list[BoundedText], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICE_TEXTS)
]


class JsonSchema(StrictModel):
    """A schema. It is always enforced, whatever the value of `strict`."""

    name: Name | None = None
    description: BoundedText | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


def check_schema_type(kind: str, *, has_schema: bool) -> None:
    """Raise `ValueError` for a type of format without its schema, or with one that it cannot have.

    A schema is optional for `json_object`, as in llama.cpp.
    """
    if has_schema if kind == "text" else kind == "json_schema" and not has_schema:
        raise ValueError("type='json_schema' requires a schema, and type='text' excludes it")


class Format(StrictModel):
    """Format of an answer, with a schema in OpenAI's field or in that of llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Check that the type may have the schema, and that there is one only."""
        named = self.json_schema is not None
        if named and (self.schema_ is not None or self.type != "json_schema"):
            raise ValueError("json_schema requires type='json_schema' and excludes schema")
        check_schema_type(self.type, has_schema=named or self.schema_ is not None)
        return self


class StructuredOutputs(StrictModel):
    """vLLM's constraints; at least one must be given."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: BoundedText | None = None
    choice: ChoiceTexts | None = None
    grammar: BoundedText | None = None

    @model_validator(mode="after")
    def require_constraint(self) -> Self:
        """Require at least one constraint."""
        constraints = (self.json_object or None, self.json_, self.regex, self.choice, self.grammar)
        if all(value is None for value in constraints):
            raise ValueError("must have one of json, json_object, regex, choice, grammar")
        return self


class RequestConstraint(NamedTuple):
    """A constraint: the library's option, its value, and the request field that set it."""

    option: str
    value: Any
    field: str


CONSTRAINT_FIELDS = {
    field: option.name
    for form in ("response_format", "structured_outputs")
    for option in REQUEST_OPTIONS.values()
    for field in option_fields(option)
    if field.startswith(form)
}
"""Options of the library by the request fields that set them."""

JSON_OBJECT_FIELDS = {"response_format.type": "json_object", "structured_outputs.json_object": True}
"""Fields that request any JSON object, and the values that do so."""

ATTRIBUTE_NAMES = {"schema": "schema_", "json": "json_"}
"""Attributes of fields whose own names pydantic reserves."""


def get_field(value: Any, field: str) -> Any:
    """Return the value at a field's dotted path; None if absent."""
    for name in field.split("."):
        value = getattr(value, ATTRIBUTE_NAMES.get(name, name), None)
    return value


class ConstraintFields(StrictModel):
    """Fields that constrain the answer; a request sets at most one of them."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def constraints(self) -> Iterator[RequestConstraint]:
        """Yield all constraints of the request."""
        for field, option in CONSTRAINT_FIELDS.items():
            value, form = get_field(self, field), field.partition(".")[0]
            if field not in JSON_OBJECT_FIELDS:
                if value is not None:
                    yield RequestConstraint(option, value, field)
            elif value == JSON_OBJECT_FIELDS[field] and get_field(self, f"{form}.schema") is None:
                yield RequestConstraint(option, {"type": "object"}, field)

    @property
    def constraint(self) -> RequestConstraint | None:
        """The request's constraint, or None."""
        return next(self.constraints, None)

    @model_validator(mode="after")
    def check_single_constraint(self) -> Self:
        """Reject more than one constraint."""
        if len(rules := [*self.constraints]) > 1:
            one, other = rules[0].field, rules[1].field
            raise OptionError(
                other, rules[1].value, f"cannot be combined with {one}; set only one constraint"
            )
        return self


TOOL_PARAM = re.compile(r"tools|tool_choice|parallel_tool_calls|messages.*tool_call")
"""Options and parts of messages whose names are paths of fields."""


class Function(StrictModel):
    """A function that a model may call. Its schema is no contract without `strict`."""

    name: Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]
    description: BoundedText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool, of which there is one type."""

    type: Literal["function"]
    function: Function


class FunctionReference(StrictModel):
    """The name of a function."""

    name: Name


class NamedChoice(StrictModel):
    """The function to call."""

    type: Literal["function"]
    function: FunctionReference


class CalledFunction(StrictModel):
    """The function of a call, and its arguments as JSON."""

    name: Name
    arguments: BoundedText


class Call(StrictModel):
    """A call in a message of the assistant."""

    id: Name
    type: Literal["function"]
    function: CalledFunction


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice
Calls = Annotated[list[Call], Field(fail_fast=True, max_length=MAX_CALLS)]


def dotted_error(error: OptionError) -> OptionError:
    """Return an error that names a field by its path in a request: `tools.0` for `tools[0]`."""
    param = re.sub(r"\[(\d+)\]", r".\1", error.param)
    return OptionError(param, error.value, error.reason)


MAX_CHOICES_PER_PROMPT = 8
MAX_CHOICES = 64

BoundedTokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
JsonScalar = Annotated[str, Field(max_length=256)] | int | float | bool | None
BoundedTokenIds = Annotated[
    list[BoundedTokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ANSWER_TOKENS)
]
EmptyList = Annotated[list[None], Field(max_length=0)]


TopCount = Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)]


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
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


TopK = Annotated[Whole, Field(ge=1, le=MAX_COUNT), BeforeValidator(disable_top_k)]

JSON_TYPES: dict[str, Any] = {
    "max_tokens": Annotated[bounded_type(REQUEST_OPTIONS["max_tokens"]), WrapValidator(read_limit)],
    "stop": StopString | Annotated[list[StopString], Field(max_length=16)],
    "stop_ids": Annotated[list[BoundedTokenId], Field(max_length=64)],
    "logit_bias": LogitBias,
    "top_k": TopK,
    "reasoning_effort": Literal[EFFORTS],
}
"""Types of options whose JSON form differs from the Python form."""


LENGTH_OPTIONS = tuple(
    o.name
    for o in REQUEST_OPTIONS.values()
    if option_info(o).limits == Bounds(0, MAX_ANSWER_TOKENS)
)
"""Options that limit the tokens of an answer."""


def request_option_fields() -> Iterator[tuple[str, Any]]:
    """Yield the request fields that set one option each, with their types."""
    for option in REQUEST_OPTIONS.values():
        fields = option_fields(option)
        if option.name in JSON_TYPES or fields and option.kind in (bool, int, float):
            kind = JSON_TYPES.get(option.name) or bounded_type(option)
            yield fields[0], (kind | None, None)


if TYPE_CHECKING:
    OptionFields = ConstraintFields
else:
    OptionFields = create_model(
        "OptionFields", __base__=ConstraintFields, **dict(request_option_fields())
    )


class BaseRequest(OptionFields):
    """Fields common to both kinds of requests."""

    model: Name | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES_PER_PROMPT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    outpace: Extension | None = None

    # Accepted from clients and ignored.
    user: ShortText | None = None

    @model_validator(mode="after")
    def check_stream(self) -> Self:
        """Reject stream options without `stream`, and fields that streams do not have."""
        for name in ("stream_options", "return_progress"):
            if (value := getattr(self, name)) and not self.stream:
                raise OptionError(name, value, "needs stream=true")
        for name, is_set in {"stream": self.stream, "outpace.fill": self.extension.fill}.items():
            if is_set and (count := get_field(self, "prompt_logprobs")) is not None:
                raise OptionError(
                    "prompt_logprobs", count, f"cannot be combined with {name}; set one"
                )
        return self

    @property
    def own_options(self) -> dict[str, Any]:
        """Options of the library that are not the values of fields of their names."""
        return {}

    def to_options(
        self, *, most: int | None = None, fits: bool = False, **others: Unpack[Options]
    ) -> RequestOptions:
        """Return the options of one choice; `others` are no fields of a request.

        An answer has at most `most` tokens: a greater length is refused, or reduced with `fits`.
        """
        values = {
            option.name: get_field(self, field)
            for option in REQUEST_OPTIONS.values()
            if option_info(option).group != "rule"
            for field in option_fields(option)
        }
        if self.constraint is not None:
            values[self.constraint.option] = self.constraint.value
        values |= self.own_options | others
        for name in LENGTH_OPTIONS:
            if most is not None and (values[name] or 0) > most:
                if not fits:
                    raise OptionError(name, None, f"must be at most {most} on this server")
                values[name] = most
        return RequestOptions.of({n: value for n, value in values.items() if value is not None})

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether each chunk has the token counts of its choice so far, as vLLM's."""
        continuous = self.stream_options and self.stream_options.continuous_usage_stats
        return self.wants_usage and bool(continuous)

    @property
    def extension(self) -> Extension:
        """Fields specific to outpace, or their defaults."""
        return self.outpace or Extension()


class TextPart(OpenModel):
    """A text part of a message."""

    type: Literal["text"]
    text: BoundedText


MessageParts = Annotated[list[TextPart], Field(max_length=1024)]


class Message(StrictModel):
    """A message of a conversation; `developer` is a synonym of `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[BoundedText | MessageParts | None, *ContentRule] = None
    name: Name | None = None
    reasoning_content: BoundedText | None = None
    tool_calls: Calls | None = None
    tool_call_id: Name | None = None

    # Clients return the assistant's messages unchanged.
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: EmptyList | None = None

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
        if self.name is not None and self.role != "tool":  # results have that of their function
            message["name"] = self.name
        return message | ({"tool_call_id": self.tool_call_id} if self.tool_call_id else {})

    def check_fields(self, param: str) -> None:
        """Raise `OptionError` for a field that is missing, or does not belong to the role."""
        if self.role == "tool" and self.tool_call_id is None:
            field = f"{param}.tool_call_id"
            raise OptionError(field, None, "is required in a message of tool")
        roles = dict.fromkeys(("tool_calls", "reasoning_content"), "assistant")
        roles |= {"tool_call_id": "tool"}
        for name, role in roles.items():
            if getattr(self, name) and self.role != role:
                field = f"{param}.{name}"
                raise OptionError(field, None, f"only messages of {role} may have it")


class ChatRequest(BaseRequest):
    """A conversation to be continued with the next message."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1024)]
    max_completion_tokens: AnswerLength | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    chat_template_kwargs: Annotated[dict[Name, JsonScalar], Field(max_length=32)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    # Accepted from clients and ignored.
    metadata: Annotated[dict[Name, ShortText], Field(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None

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
        older = get_field(self, "max_tokens")
        if self.max_completion_tokens is not None and older is not None:
            raise OptionError("max_tokens", older, "cannot be combined with max_completion_tokens")
        return self

    @model_validator(mode="after")
    def check_continued(self) -> Self:
        """Reject `add_generation_prompt` unless a new turn is exactly what follows."""
        new_turn, continues = self.add_generation_prompt, bool(self.continue_final_message)
        if new_turn is not None and new_turn == continues:
            raise OptionError(
                "add_generation_prompt", new_turn, "must be the opposite of continue_final_message"
            )
        return self

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        """Reject a number of tokens without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs", self.top_logprobs, "needs logprobs=true")
        return self

    @model_validator(mode="after")
    def check_messages(self) -> Self:
        """Check the fields of messages."""
        for number, message in enumerate(self.messages):
            message.check_fields(f"messages.{number}")
        return self

    @property
    def own_options(self) -> dict[str, Any]:
        tools = self.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"})
        if self.max_completion_tokens is not None:
            tools["max_tokens"] = self.max_completion_tokens
        return tools | {
            "top_logprobs": self.top_logprobs,
            "continue_final_message": self.continue_final_message,
        }


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
            raise OptionError("best_of", self.best_of, "must equal n")
        if self.suffix is not None:
            self.check_suffix()
        self.check_echo()
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise OptionError(
                "prompt", len(self.prompts), f"cannot have over {MAX_CHOICES} choices (n each)"
            )
        return self

    def check_suffix(self) -> None:
        """Raise `OptionError` for prompts and fields that cannot precede a suffix."""
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise OptionError("prompt", self.prompt, "must be text with suffix")
        if self.extension.fill:
            raise OptionError(
                "suffix", self.suffix, "cannot be combined with outpace.fill; set one"
            )

    @property
    def echoes_scores(self) -> bool:
        """Whether the answer has the log-probabilities of the prompt before its own."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def own_options(self) -> dict[str, Any]:
        scores = {"prompt_logprobs": self.logprobs} if self.echoes_scores else {}
        return scores | {
            "raw": True,
            "suffix": self.suffix,
            "logprobs": self.logprobs is not None,
            "top_logprobs": self.logprobs,
        }

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
                raise OptionError("echo", self.echo, f"cannot be combined with {name}; set one")

    @property
    def prompts(self) -> list[Any]:
        """The prompts as a list."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else list(self.prompt)
