"""Answers of Anthropic's Messages API, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from outpace.api.output import Event, Output
from outpace.api.pending_request import PendingRequest
from outpace.server.blocks import Block, BlockChange, BlockParser, answer_blocks
from outpace.server.http_error import HttpError
from outpace.server.messages_schema import MessagesRequest
from outpace.server.models import HostedModel
from outpace.server.reply import call_id, dump_json
from outpace.server.writer import AnswerWriter, Translation

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
        r"messages.*": "messages",
        r"stop$": "stop_sequences",
        r"(tools\.\d+)\.function\.parameters": r"\1.input_schema",
        r"(tools\.\d+)\.function": r"\1",
        r"tool_choice.*|parallel_tool_calls": "tool_choice",
        r"max_reasoning_tokens": "thinking.budget_tokens",
        r"reasoning_effort": "thinking",
    }

    def __init__(self, original: MessagesRequest, model: HostedModel) -> None:
        with self.rename_faults():
            self.request = original.to_chat(can_think=model.text.thought_format is not None)

    def open_writer(self, model: HostedModel, number: int) -> AnswerWriter:
        """Return the writer of the answer."""
        return MessagesWriter(model, number)


class MessagesWriter(AnswerWriter):
    """Answers of the Messages API."""

    def __init__(self, model: HostedModel, number: int) -> None:
        self.model, self.number = model, number
        self.id = f"msg_{number:024x}"
        self.parser: BlockParser

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
            "usage": {
                "input_tokens": prompt_tokens,
                "output_tokens": 0 if output is None else output.chosen,
            },
        }

    def format_block(self, block: Block) -> ReplyObject:
        """Return a block with its content."""
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
        """Return the event before all blocks."""
        self.parser = BlockParser(pending[0].format)
        message = self.format_message(None, len(pending[0].prompt))
        return format_event("message_start", message=message)

    def format_event(self, index: int, event: Event) -> str:
        """Return the events for the progress of the answer."""
        return "".join(map(self.format_change, self.parser.feed_event(event)))

    def format_change(self, change: BlockChange) -> str:
        """Return the events for a change of a block."""
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
        """Return the events after all blocks."""
        (output,) = outputs
        usage = {"output_tokens": output.chosen}
        ends = format_event("message_delta", delta=stop_fields(output), usage=usage)
        return (ends + format_event("message_stop")).encode()

    def format_answer(self, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> bytes:
        """Return the whole message."""
        (output,) = outputs
        return dump_json(self.format_message(output, output.prompt_tokens)).encode()

    def format_failure(self, fault: HttpError) -> bytes:
        """Return the event of an error."""
        return f"event: error\ndata: {dump_json(error_object(fault))}\n\n".encode()


def format_event(name: str, /, **fields: Any) -> str:
    """Return an event."""
    return f"event: {name}\ndata: {dump_json({'type': name, **fields})}\n\n"


def stop_fields(output: Output) -> ReplyObject:
    """Return why an answer ended."""
    reason = STOP_REASONS[output.finish_reason]
    if output.stop_string is not None:
        reason = "stop_sequence"
    elif output.tool_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": output.stop_string}


def error_object(fault: HttpError) -> ReplyObject:
    """Return an error as Anthropic's clients expect it."""
    error = fault.error_object["error"]
    kind = "api_error" if fault.status >= 500 else error["type"]
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def error_response(fault: HttpError) -> Response:
    """Return the response of an error."""
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
