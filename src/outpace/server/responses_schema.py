"""Requests of OpenAI's Responses API, and their translation to chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from outpace.api.options import MAX_ANSWER_TOKENS
from outpace.api.tools import FUNCTION_NAME, MAX_TOOLS
from outpace.server.bounds import BoundedText, Name, ShortText, StrictModel
from outpace.server.schema import ChatRequest, EmptyList, JsonScalar, MethodExtension
from outpace.server.writer import build_chat_request

MAX_ITEMS = 4096
"""Maximum number of items of an input."""

Status = Literal["in_progress", "completed", "incomplete"] | None


class InputText(StrictModel):
    """A text in a message. Clients return those of answers unchanged."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: BoundedText
    annotations: EmptyList | None = None
    logprobs: EmptyList | None = None


Texts = BoundedText | Annotated[list[InputText], Field(max_length=1024)]


class MessageItem(StrictModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    id: ShortText | None = None
    status: Status = None
    phase: ShortText | None = None


class CallItem(StrictModel):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: BoundedText
    id: ShortText | None = None
    status: Status = None


class CallOutputItem(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Texts
    id: ShortText | None = None
    status: Status = None


class ReasoningItem(StrictModel):
    """Thoughts of the model before its next message or call."""

    type: Literal["reasoning"]
    summary: EmptyList | None = None
    content: Annotated[list[InputText], Field(max_length=1024)] | None = None
    encrypted_content: None = None
    id: ShortText | None = None
    status: Status = None


def item_tag(item: object) -> str:
    """Return the tag of an input item; the type of a message may be omitted."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return f"dict-{kind}"


InputItem = Annotated[
    Annotated[MessageItem, Tag("dict-message")]
    | Annotated[CallItem, Tag("dict-function_call")]
    | Annotated[CallOutputItem, Tag("dict-function_call_output")]
    | Annotated[ReasoningItem, Tag("dict-reasoning")],
    Discriminator(
        item_tag,
        custom_error_type="item_type",
        custom_error_message=(
            "Input should be a message, function_call, function_call_output or reasoning"
        ),
    ),
]


class FunctionTool(StrictModel):
    """A function that the model may call. Its schema is always enforced."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]
    description: BoundedText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(StrictModel):
    """The function to call."""

    type: Literal["function"]
    name: Name


class TextFormat(StrictModel):
    """Format of the text of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: BoundedText | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Require a schema exactly for type `json_schema`."""
        if (self.type == "json_schema") == (self.schema_ is None):
            raise ValueError("type='json_schema' and the field schema go together")
        return self


class TextOptions(StrictModel):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(StrictModel):
    """Options of the thoughts of an answer."""

    effort: Name | None = None
    summary: None = None


class ResponsesRequest(StrictModel):
    """A conversation to be continued. Nothing is stored, so it is sent whole each time."""

    model: Name
    input: Annotated[
        BoundedText | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_ITEMS)],
        Field(min_length=1),
    ]
    instructions: BoundedText | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_ANSWER_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None

    # Fields of chats that OpenAI's API does not have.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_reasoning_tokens: Annotated[int, Field(ge=0, le=MAX_ANSWER_TOKENS)] | None = None
    chat_template_kwargs: Annotated[dict[Name, JsonScalar], Field(max_length=32)] | None = None
    outpace: MethodExtension | None = None

    # Accepted from clients and ignored.
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = (
        None
    )
    metadata: Annotated[dict[Name, ShortText], Field(max_length=16)] | None = None
    user: ShortText | None = None
    service_tier: Name | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    truncation: Literal["disabled"] | None = None

    # Not supported, except for values that disable the feature.
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None

    def to_chat(self) -> ChatRequest:
        """Return the request as a chat; raises `HttpError` for an invalid conversation."""
        reasoning = self.reasoning or ReasoningOptions()
        extension = None if self.outpace is None else self.outpace.model_dump(exclude_none=True)
        same = ("model", "temperature", "top_p", "stream", "seed", "parallel_tool_calls")
        fields = {name: getattr(self, name) for name in same}
        return build_chat_request(
            fields
            | {
                "messages": [*self.messages()],
                "max_completion_tokens": self.max_output_tokens,
                "tools": None if self.tools is None else [*map(declare_tool, self.tools)],
                "tool_choice": self.chat_tool_choice(),
                "response_format": self.response_format(),
                "reasoning_effort": reasoning.effort,
                "max_reasoning_tokens": self.max_reasoning_tokens,
                "chat_template_kwargs": self.chat_template_kwargs,
                "outpace": extension,
            }
        )

    def chat_tool_choice(self) -> Any:
        """Return the choice of tools in the form of chats."""
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return {"type": "function", "function": {"name": choice.name}}
        return choice

    def response_format(self) -> dict[str, Any] | None:
        """Return the format of the text in the form of chats."""
        form = None if self.text is None else self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        schema = {"name": form.name or "answer", "schema": form.schema_}
        return {"type": form.type, "json_schema": schema}

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the conversation; thoughts, text and calls of a turn are one."""
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        turn: dict[str, Any] = {}
        for item in self.input:
            if starts_turn(turn, item) and turn:
                yield complete_turn(turn)
                turn = {}
            match item:
                case MessageItem(role="assistant"):
                    turn |= {"role": "assistant", "content": join_texts(item.content)}
                case ReasoningItem():
                    turn |= {"role": "assistant", "reasoning_content": join_texts(item.content)}
                case CallItem():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    turn |= {"role": "assistant", "tool_calls": [*turn.get("tool_calls", ()), call]}
                case MessageItem():
                    yield {"role": item.role, "content": join_texts(item.content)}
                case CallOutputItem():
                    output = join_texts(item.output)
                    yield {"role": "tool", "tool_call_id": item.call_id, "content": output}
        if turn:
            yield complete_turn(turn)


def complete_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn of the assistant, with an empty text if it has thoughts only."""
    return turn if turn.keys() & {"content", "tool_calls"} else {**turn, "content": ""}


def starts_turn(turn: dict[str, Any], item: object) -> bool:
    """Return whether an item is not part of the assistant's turn so far."""
    match item:
        case ReasoningItem():
            return True
        case MessageItem(role="assistant"):
            return "content" in turn or "tool_calls" in turn
        case CallItem():
            return False
    return True


def join_texts(content: str | Sequence[InputText] | None) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def declare_tool(tool: FunctionTool) -> dict[str, Any]:
    """Return a tool in the form of chats."""
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
