"""OpenAI's Responses API: its fields, and answers whole and as events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from outpace.api.engine_client import PendingRequest
from outpace.api.options import MAX_ANSWER_TOKENS
from outpace.api.output import Event, Output, count_reasoning_tokens
from outpace.api.text import TextCodec
from outpace.api.tools import FUNCTION_NAME, MAX_TOOLS
from outpace.server.http_error import CONTEXT_CODE, HttpError
from outpace.server.models import HostedModel
from outpace.server.option_types import Whole
from outpace.server.reply import call_id, dump_json
from outpace.server.schema import (
    AnswerLength,
    BoundedText,
    ChatRequest,
    ContentRule,
    JsonScalar,
    MethodExtension,
    Name,
    OpenModel,
    OtherPart,
    ProviderTool,
    ShortText,
    StrictModel,
    check_schema_type,
    join_texts,
    read_type,
    result_part_tag,
)
from outpace.server.writer import (
    AnswerWriter,
    Block,
    BlockBuilder,
    BlockChange,
    Translation,
    answer_blocks,
    build_chat_request,
)

MAX_ITEMS = 4096
"""Maximum number of items of an input."""


class InputText(OpenModel):
    """A text in a message. Clients return those of answers unchanged."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: BoundedText


ResultPart = Annotated[
    Annotated[InputText, Tag("dict-text")] | Annotated[OtherPart, Tag("dict-other")],
    Discriminator(result_part_tag),
]
Texts = BoundedText | Annotated[list[InputText], Field(max_length=1024)]


class MessageItem(OpenModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Texts | None, *ContentRule] = None


class CallItem(OpenModel):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: BoundedText


class CallOutputItem(OpenModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: BoundedText | Annotated[list[ResultPart], Field(max_length=1024)]


class ReasoningItem(OpenModel):
    """Thoughts of the model before its next message or call."""

    type: Literal["reasoning"]
    content: Annotated[list[InputText], Field(max_length=1024)] | None = None


def item_tag(item: object) -> str:
    """Return the tag of an input item; the type of a message may be omitted."""
    is_typed = not isinstance(item, dict) or "type" in item
    return f"dict-{read_type(item) if is_typed else 'message'}"


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
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]
    description: BoundedText | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    # Accepted from clients and ignored.
    defer_loading: bool | None = None


def tool_tag(tool: object) -> str:
    return "dict-function" if read_type(tool) == "function" else "dict-provider"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("dict-function")] | Annotated[ProviderTool, Tag("dict-provider")],
    Discriminator(tool_tag),
]


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
        check_schema_type(self.type, has_schema=self.schema_ is not None)
        return self


class TextOptions(StrictModel):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(StrictModel):
    """Options of the thoughts of an answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Name | None = None


class ResponsesRequest(StrictModel):
    """A conversation to be continued. Nothing is stored, so it is sent whole each time."""

    model: Name | None = None
    input: Annotated[
        BoundedText | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_ITEMS)],
        Field(min_length=1),
    ]
    instructions: BoundedText | None = None
    max_output_tokens: AnswerLength | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None

    # Fields of chats that OpenAI's API does not have.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_reasoning_tokens: Annotated[Whole, Field(ge=0, le=MAX_ANSWER_TOKENS)] | None = None
    chat_template_kwargs: Annotated[dict[Name, JsonScalar], Field(max_length=32)] | None = None
    outpace: MethodExtension | None = None

    # Accepted from clients and ignored.
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = (
        None
    )
    metadata: Annotated[dict[Name, ShortText], Field(max_length=16)] | None = None
    client_metadata: dict[str, Any] | None = None
    user: ShortText | None = None
    service_tier: Name | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    truncation: Literal["disabled"] | None = None

    # Not supported, except for values that disable the feature.
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None

    def to_chat(self, text: TextCodec) -> ChatRequest:
        """Return the request as a chat for a model; raises `HttpError` if it is invalid."""
        # An effort has no effect on templates without a variable for it: clients send it to all
        # models.
        has_effort = {"reasoning_effort", "enable_thinking"} & {*text.template_variables}
        effort = self.reasoning.effort if self.reasoning is not None and has_effort else None
        extension = None if self.outpace is None else self.outpace.model_dump(exclude_none=True)
        same = ("model", "temperature", "top_p", "stream", "seed", "parallel_tool_calls")
        fields = {name: getattr(self, name) for name in same}
        return build_chat_request(
            fields
            | {
                "messages": [*self.messages()],
                "max_completion_tokens": self.max_output_tokens,
                "tools": [*map(declare_tool, self.functions)],
                "tool_choice": self.chat_tool_choice(),
                "response_format": self.response_format(),
                "reasoning_effort": effort,
                "max_reasoning_tokens": self.max_reasoning_tokens,
                "chat_template_kwargs": self.chat_template_kwargs,
                "outpace": extension,
            }
        )

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def chat_tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            return {"type": "function", "function": {"name": choice.name}}
        return None if choice == "auto" else choice

    def response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        return None if form is None else {"type": form.type, "schema": form.schema_}

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
    match item:
        case ReasoningItem():
            return True
        case MessageItem(role="assistant"):
            return "content" in turn or "tool_calls" in turn
        case CallItem():
            return False
    return True


def declare_tool(tool: FunctionTool) -> dict[str, Any]:
    ignored = {"type", "defer_loading"}
    return {"type": "function", "function": tool.model_dump(exclude=ignored, exclude_none=True)}


ReplyObject = dict[str, Any]

ITEM_PREFIXES = {"thoughts": "rs", "text": "msg", "call": "fc"}
"""Prefixes of the ids of items by the kind of their block."""

PART_TYPES = {"thoughts": "reasoning_text", "text": "output_text"}
"""Types of the contents of items by the kind of their block."""


class ResponsesTranslation(Translation):
    """A request of the Responses API, as a chat request."""

    RENAMED_FIELDS = {
        r"max_(completion_)?tokens$": "max_output_tokens",
        r"messages.*": "input",
        r"response_format": "text.format",
        r"reasoning_effort": "reasoning.effort",
        r"(tools\.\d+)\.function": r"\1",
        r"tool_choice\.function": "tool_choice",
    }

    def __init__(self, original: ResponsesRequest, model: HostedModel) -> None:
        self.original = original
        with self.rename_faults():
            self.request = original.to_chat(model.text)

    def open_writer(self, model: HostedModel, number: int) -> AnswerWriter:
        return ResponsesWriter(self.original, model, number)


class ResponsesWriter(AnswerWriter):
    """Answers of the Responses API."""

    def __init__(self, request: ResponsesRequest, model: HostedModel, number: int) -> None:
        self.request, self.model, self.number = request, model, number
        self.id = f"resp_{number:024x}"
        self.created = int(time.time())
        self.num_events = 0
        self.blocks: BlockBuilder

    def format_object(self, output: Output | None, error: ReplyObject | None = None) -> ReplyObject:
        request, status, details = self.request, "failed" if error else "in_progress", None
        items: list[ReplyObject] = []
        if output is not None:
            is_cut = output.finish_reason == "length"
            status = "incomplete" if is_cut else "completed"
            details = {"reason": "max_output_tokens"} if is_cut else None
            items = [self.format_item(block, "completed") for block in answer_blocks(output)]
            if is_cut:
                items[-1]["status"] = status
        given = request.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": details,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens if output is None else output.max_tokens,
            "model": self.model.name,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [
                {"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)}
                for tool in request.functions
            ],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if output is None else self.format_usage(output),
            "metadata": request.metadata or {},
            **({} if output is None else {"outpace": output.draft_figures}),
        }

    def format_usage(self, output: Output) -> ReplyObject:
        thoughts = count_reasoning_tokens(self.model.text, output)
        return {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens": output.chosen,
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": output.prompt_tokens + output.chosen,
        }

    def format_item(self, block: Block, status: str) -> ReplyObject:
        item: ReplyObject = {"id": self.item_id(block), "status": status}
        match block.kind:
            case "thoughts":
                content = [format_part(block)] if block.text else []
                return item | {"type": "reasoning", "summary": [], "content": content}
            case "text":
                content = [format_part(block)] if block.text or status == "completed" else []
                return item | {"type": "message", "role": "assistant", "content": content}
        return item | {
            "type": "function_call",
            "call_id": call_id(self.number, 0, block.number),
            "name": block.name,
            "arguments": block.text,
        }

    def item_id(self, block: Block) -> str:
        return f"{ITEM_PREFIXES[block.kind]}_{self.number:024x}{block.number:02x}"

    def format_event_text(self, name: str, /, **fields: Any) -> str:
        value = {"type": name, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return f"event: {name}\ndata: {dump_json(value)}\n\n"

    def begin_stream(self, pending: Sequence[PendingRequest]) -> str:
        self.blocks = BlockBuilder()
        response = self.format_object(None)
        return self.format_event_text(
            "response.created", response=response
        ) + self.format_event_text("response.in_progress", response=response)

    def format_ping(self) -> str:
        """Return the event that OpenAI's server sends, too."""
        return self.format_event_text("keepalive")

    def format_event(self, index: int, event: Event) -> str:
        is_cut = event.output is not None and event.output.finish_reason == "length"
        return "".join(
            self.format_change(change, is_cut) for change in self.blocks.add_event(event)
        )

    def format_change(self, change: BlockChange, is_cut: bool) -> str:
        block, send = change.block, self.format_event_text
        at: ReplyObject = {"output_index": block.number}
        place = at | {"item_id": self.item_id(block)}
        if block.kind != "call":
            place["content_index"] = 0
        kind = PART_TYPES.get(block.kind, "function_call_arguments")
        part = {} if block.kind == "call" else {"part": format_part(block)}
        more: ReplyObject = {"logprobs": []} if block.kind == "text" else {}
        match change.change:
            case "begin":
                item = self.format_item(block, "in_progress")
                begun = send("response.output_item.added", **at, item=item)
                return begun + (
                    send("response.content_part.added", **place, **part) if part else ""
                )
            case "text":
                return send(f"response.{kind}.delta", **place, delta=change.text, **more)
        if block.kind == "call":
            more = {"name": block.name, "arguments": block.text}
        else:
            more["text"] = block.text
        ended = send(f"response.{kind}.done", **place, **more)
        ended += send("response.content_part.done", **place, **part) if part else ""
        item = self.format_item(block, "incomplete" if is_cut and change.is_last else "completed")
        return ended + send("response.output_item.done", **at, item=item)

    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        response = self.format_object(outputs[0])
        return self.format_event_text(f"response.{response['status']}", response=response).encode()

    def format_answer(self, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> bytes:
        return dump_json(self.format_object(outputs[0])).encode()

    def streams_refusal(self, fault: HttpError) -> bool:
        """Return whether the context is exceeded: only there Codex shortens its conversation."""
        return fault.code == CONTEXT_CODE

    def format_failure(self, fault: HttpError) -> bytes:
        error = {"code": fault.code or "server_error", "message": str(fault)}
        response = self.format_object(None, error)
        return self.format_event_text("response.failed", response=response).encode()


def format_part(block: Block) -> ReplyObject:
    part: ReplyObject = {"type": PART_TYPES[block.kind], "text": block.text}
    return part | ({"annotations": [], "logprobs": []} if block.kind == "text" else {})
