"""Anthropic's Messages API: its fields, and answers whole and as events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from starlette.responses import Response

from outpace.api.engine_client import PendingRequest
from outpace.api.options import MAX_ANSWER_TOKENS
from outpace.api.output import Event, Output
from outpace.api.text import TextCodec
from outpace.api.tools import FUNCTION_NAME, MAX_TOOLS
from outpace.errors import OptionError
from outpace.server.http_error import HttpError
from outpace.server.logs import LOG
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
    StopString,
    StrictModel,
    TopK,
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

CacheControl = dict[Name, JsonScalar] | None


class TextBlock(OpenModel):
    """A text."""

    type: Literal["text"]
    text: BoundedText


class ThinkingBlock(OpenModel):
    """Thoughts of the model. Their signature is ignored."""

    type: Literal["thinking"]
    thinking: BoundedText


class RedactedThinkingBlock(OpenModel):
    """Encrypted thoughts of another provider's model, which are left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(OpenModel):
    """A call of a tool by the model."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


Texts = BoundedText | Annotated[list[TextBlock], Field(max_length=1024)]


ResultPart = Annotated[
    Annotated[TextBlock, Tag("dict-text")] | Annotated[OtherPart, Tag("dict-other")],
    Discriminator(result_part_tag),
]


class ToolResultBlock(OpenModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: BoundedText | Annotated[list[ResultPart], Field(max_length=1024)] | None = None


class MediaBlock(OtherPart):
    """An image or a document that belongs to the result of a call in the same turn."""

    type: Literal["image", "document"]


def block_tag(block: object) -> str:
    kind = read_type(block)
    return "dict-media" if kind in ("image", "document") else f"dict-{kind}"


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("dict-text")]
    | Annotated[ThinkingBlock, Tag("dict-thinking")]
    | Annotated[RedactedThinkingBlock, Tag("dict-redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("dict-tool_use")]
    | Annotated[ToolResultBlock, Tag("dict-tool_result")]
    | Annotated[MediaBlock, Tag("dict-media")],
    Discriminator(
        block_tag,
        custom_error_type="block_type",
        custom_error_message="Input should be a block of text, thinking, tool_use or tool_result",
    ),
]


ROLES_OF_BLOCKS = {"tool_result": "user"} | dict.fromkeys(
    ("thinking", "redacted_thinking", "tool_use"), "assistant"
)


class TurnMessage(StrictModel):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        BoundedText | Annotated[list[ContentBlock], Field(fail_fast=True, max_length=1024)] | None,
        *ContentRule,
    ] = None

    @property
    def blocks(self) -> Sequence[Any]:
        return () if isinstance(self.content, str) else self.content or ()


class MessagesTool(StrictModel):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=f"^{FUNCTION_NAME.pattern}$")]
    description: BoundedText | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    # Accepted from clients and ignored.
    cache_control: CacheControl = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Name] | None = None
    input_examples: list[dict[str, Any]] | None = None


def tool_tag(tool: object) -> str:
    """Return the tag of a tool; clients define those without a type."""
    return "dict-custom" if read_type(tool) in (None, "custom") else "dict-provider"


AnyTool = Annotated[
    Annotated[MessagesTool, Tag("dict-custom")] | Annotated[ProviderTool, Tag("dict-provider")],
    Discriminator(tool_tag),
]


class MessagesToolChoice(StrictModel):
    """Whether a tool is called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """Whether the model thinks, and the maximum number of tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Whole, Field(ge=0, le=MAX_ANSWER_TOKENS)] | None = None
    display: Name | None = None


class OutputFormat(StrictModel):
    """Schema of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """Effort and form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(StrictModel):
    """Identity of the user."""

    user_id: ShortText | None = None


class CountTokensRequest(StrictModel):
    """A conversation whose tokens are counted, with any fields of its continuation."""

    model: Name | None = None
    messages: Annotated[list[TurnMessage], Field(fail_fast=True, min_length=1, max_length=1024)]
    system: Texts | None = None
    max_tokens: AnswerLength | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stream: bool | None = None

    # Fields of chats that Anthropic's API does not have.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    chat_template_kwargs: Annotated[dict[Name, JsonScalar], Field(max_length=32)] | None = None
    outpace: MethodExtension | None = None

    # Accepted from clients and ignored.
    metadata: Metadata | None = None
    service_tier: Name | None = None
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_blocks(self) -> Self:
        for number, message in enumerate(self.messages):
            blocks = message.blocks
            has_result = any(isinstance(block, ToolResultBlock) for block in blocks)
            for place, block in enumerate(blocks):
                role = ROLES_OF_BLOCKS.get(block.type, message.role)
                if message.role != role:
                    param = f"messages.{number}.content.{place}"
                    raise OptionError(
                        param, block.type, f"blocks of type {block.type} belong to {role}"
                    )
                if isinstance(block, MediaBlock) and not has_result:
                    param = f"messages.{number}.content.{place}"
                    raise OptionError(
                        param, block.type, f"blocks of type {block.type} accompany results: omit it"
                    )
        return self

    def to_chat(self, text: TextCodec) -> ChatRequest:
        """Return the request as a chat for a model; raises `HttpError` if it is invalid."""
        # Fields about thoughts have no effect on models without any, nor efforts on templates
        # without the variable: clients send them to all models.
        choice, thinking = self.tool_choice, self.thinking or Thinking(type="adaptive")
        config, tools = self.output_config or OutputConfig(), self.tools or ()
        can_think = text.thought_format is not None
        effort: str | None = config.effort
        messages = [*self.chat_messages()]
        if messages[-1] == EMPTY_TURN:  # it begins no answer
            messages.pop()
        continues = bool(messages) and messages[-1]["role"] == "assistant"
        if "reasoning_effort" not in text.template_variables:
            effort = None
        extension = None if self.outpace is None else self.outpace.model_dump(exclude_none=True)
        same = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed")
        fields = {name: getattr(self, name) for name in same}
        if can_think and thinking.type == "disabled":
            effort = "none"
        return build_chat_request(
            fields
            | {
                "messages": messages,
                "continue_final_message": continues or None,
                "stop": self.stop_sequences or None,
                "tools": [declare_tool(tool) for tool in tools if isinstance(tool, MessagesTool)],
                "tool_choice": None if choice is None else chat_tool_choice(choice),
                "response_format": None
                if (form := config.format) is None
                else {"type": form.type, "schema": form.schema_},
                "parallel_tool_calls": (
                    False if choice is not None and choice.disable_parallel_tool_use else None
                ),
                "reasoning_effort": "xhigh" if effort == "max" else effort,
                "max_reasoning_tokens": (
                    thinking.budget_tokens if can_think and not continues else None
                ),
                "chat_template_kwargs": self.chat_template_kwargs,
                "outpace": extension,
            }
        )

    def chat_messages(self) -> Iterator[dict[str, Any]]:
        system = [self.system] if isinstance(self.system, str) else self.system or ()
        texts = (each if isinstance(each, str) else each.text for each in system)
        if text := "".join(map(drop_billing_line, texts)):
            yield {"role": "system", "content": text}
        for message in self.messages:
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            elif message.role == "assistant":
                yield assistant_turn(message.blocks)
            else:
                yield from other_turn(message.role, message.blocks)


class MessagesRequest(CountTokensRequest):
    """A conversation to be continued with the next message."""

    max_tokens: AnswerLength


BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""First line of Claude Code's system text, which changes at each request: no prefix would fit."""


def drop_billing_line(text: str) -> str:
    """Return a system text without the line at its beginning by which Claude Code is billed."""
    if (line := BILLING_LINE.match(text)) is None:
        return text
    log_dropped_line()
    return text[line.end() :]


@cache
def log_dropped_line() -> None:
    LOG.info("the line x-anthropic-billing-header of system texts is left out of prompts")


EMPTY_TURN = {"role": "assistant", "content": ""}


def assistant_turn(blocks: Sequence[Any]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    message: dict[str, Any] = {**EMPTY_TURN, "content": join_texts(texts)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input)},
            }
            for call in calls
        ]
    return message


def other_turn(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn of the user or system: results of calls, then its text."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            result = join_texts(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
    texts = [block for block in blocks if isinstance(block, TextBlock | MediaBlock)]
    if texts or not blocks:
        yield {"role": role, "content": join_texts(texts)}


def declare_tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def chat_tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return {"auto": None, "any": "required", "none": "none"}[choice.type]


ReplyObject = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "end_turn"}
"""Reasons of an end by `finish_reason`, if there is no call."""

DELTA_TYPES = {
    "thoughts": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type and field of a delta by the kind of its block."""


class MessagesTranslation(Translation):
    """A request of the Messages API, as a chat request."""

    RENAMED_FIELDS = {
        r"messages.*|continue_final_message": "messages",
        r"stop$": "stop_sequences",
        r"(tools\.\d+)\.function\.parameters": r"\1.input_schema",
        r"(tools\.\d+)\.function": r"\1",
        r"tool_choice.*|parallel_tool_calls": "tool_choice",
        r"max_reasoning_tokens": "thinking.budget_tokens",
        r"reasoning_effort": "thinking",
        r"response_format": "output_config.format",
    }

    def __init__(self, original: CountTokensRequest, model: HostedModel) -> None:
        with self.rename_faults():
            self.request = original.to_chat(model.text)

    def open_writer(self, model: HostedModel, number: int) -> AnswerWriter:
        return MessagesWriter(model, number)


class MessagesWriter(AnswerWriter):
    """Answers of the Messages API."""

    def __init__(self, model: HostedModel, number: int) -> None:
        self.model, self.number = model, number
        self.id = f"msg_{number:024x}"
        self.blocks: BlockBuilder

    def format_message(self, output: Output | None, prompt_tokens: int) -> ReplyObject:
        """Return the object of a message, which is empty before its end."""
        blocks = [] if output is None else answer_blocks(output)
        shown = [block for block in blocks if block.kind != "text" or block.text]
        reasons = {"stop_reason": None, "stop_sequence": None}
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": [self.format_block(block) for block in shown],
            **(reasons if output is None else stop_fields(output)),
            "usage": format_usage(output, prompt_tokens),
            **({} if output is None else extension_fields(output)),
        }

    def format_block(self, block: Block) -> ReplyObject:
        match block.kind:
            case "thoughts":
                return {"type": "thinking", "thinking": block.text, "signature": ""}
            case "text":
                return {"type": "text", "text": block.text}
        arguments = json.loads(block.text or "{}")
        return {
            "type": "tool_use",
            "id": call_id(self.number, 0, block.number),
            "name": block.name,
            "input": arguments,
        }

    def begin_stream(self, pending: Sequence[PendingRequest]) -> str:
        self.blocks = BlockBuilder()
        message = self.format_message(None, len(pending[0].prompt))
        return format_event("message_start", message=message)

    def format_ping(self) -> str:
        ping = format_event("ping")
        if self.blocks.blocks:
            return ping
        # Claude Code cancels an answer after 300 s in which it receives pings only.
        delta = {"stop_reason": None, "stop_sequence": None}
        return ping + format_event("message_delta", delta=delta, usage={"output_tokens": 0})

    def format_event(self, index: int, event: Event) -> str:
        return "".join(map(self.format_change, self.blocks.add_event(event)))

    def format_change(self, change: BlockChange) -> str:
        block = change.block
        match change.change:
            case "begin":
                shown = self.format_block(block)
                return format_event("content_block_start", index=block.number, content_block=shown)
            case "text":
                kind, field = DELTA_TYPES[block.kind]
                delta = {"type": kind, field: change.text}
                return format_event("content_block_delta", index=block.number, delta=delta)
        return format_event("content_block_stop", index=block.number)

    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        (output,) = outputs
        usage = format_usage(output, output.prompt_tokens)
        more = extension_fields(output)
        ends = format_event("message_delta", delta=stop_fields(output), usage=usage, **more)
        return (ends + format_event("message_stop")).encode()

    def format_answer(self, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> bytes:
        (output,) = outputs
        return dump_json(self.format_message(output, output.prompt_tokens)).encode()

    def format_failure(self, fault: HttpError) -> bytes:
        return f"event: error\ndata: {dump_json(error_object(fault))}\n\n".encode()


def format_event(name: str, /, **fields: Any) -> str:
    return f"event: {name}\ndata: {dump_json({'type': name, **fields})}\n\n"


def format_usage(output: Output | None, prompt_tokens: int) -> ReplyObject:
    """Return the numbers of tokens; those read from the cache are no input tokens."""
    cached = 0 if output is None else output.cached_tokens
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": 0 if output is None else output.chosen,
    }


def stop_fields(output: Output) -> ReplyObject:
    reason = STOP_REASONS[output.finish_reason]
    if output.stop_string is not None:
        reason = "stop_sequence"
    elif output.tool_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": output.stop_string}


def extension_fields(output: Output) -> ReplyObject:
    return {"outpace": {"max_tokens": output.max_tokens, **output.draft_figures}}


def error_object(fault: HttpError) -> ReplyObject:
    error = fault.error_object["error"]
    kind = "api_error" if fault.status >= 500 else error["type"]
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def error_response(fault: HttpError) -> Response:
    body = dump_json(error_object(fault))
    return Response(body, fault.status, fault.headers, "application/json")


MESSAGES_ERROR_SCHEMA: ReplyObject = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
"""JSON schema of an error of the Messages API."""
