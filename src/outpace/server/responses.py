"""Answers of OpenAI's Responses API, whole and as events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from outpace.api.output import Event, Output, count_reasoning_tokens
from outpace.api.pending_request import PendingRequest
from outpace.server.blocks import Block, BlockChange, BlockParser, answer_blocks
from outpace.server.http_error import HttpError
from outpace.server.models import HostedModel
from outpace.server.reply import call_id, dump_json
from outpace.server.responses_schema import ResponsesRequest
from outpace.server.writer import AnswerWriter, Translation

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
        r"response_format\.json_schema\.schema": "text.format.schema",
        r"response_format": "text.format",
        r"reasoning_effort": "reasoning.effort",
        r"(tools\.\d+)\.function": r"\1",
        r"tool_choice\.function": "tool_choice",
    }

    def __init__(self, original: ResponsesRequest) -> None:
        self.original = original
        with self.rename_faults():
            self.request = original.to_chat()

    def open_writer(self, model: HostedModel, number: int) -> AnswerWriter:
        """Return the writer of the answer."""
        return ResponsesWriter(self.original, model, number)


class ResponsesWriter(AnswerWriter):
    """Answers of the Responses API."""

    def __init__(self, request: ResponsesRequest, model: HostedModel, number: int) -> None:
        self.request, self.model, self.number = request, model, number
        self.id = f"resp_{number:024x}"
        self.created = int(time.time())
        self.num_events = 0
        self.parser: BlockParser

    def format_object(self, output: Output | None, error: ReplyObject | None = None) -> ReplyObject:
        """Return the object of a response in progress, finished or failed."""
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
            "max_output_tokens": request.max_output_tokens,
            "model": self.model.name,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": given.get("reasoning", {}).get("effort"), "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [{"parameters": None, "strict": None, **t} for t in given.get("tools", ())],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if output is None else self.format_usage(output),
            "metadata": request.metadata or {},
        }

    def format_usage(self, output: Output) -> ReplyObject:
        """Return the numbers of tokens."""
        thoughts = count_reasoning_tokens(self.model.text, output)
        return {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output.chosen,
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": output.prompt_tokens + output.chosen,
        }

    def format_item(self, block: Block, status: str) -> ReplyObject:
        """Return a block as an item of the output."""
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
        """Return the id of the item of a block."""
        return f"{ITEM_PREFIXES[block.kind]}_{self.number:024x}{block.number:02x}"

    def format_event_text(self, name: str, /, **fields: Any) -> str:
        """Return an event."""
        value = {"type": name, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return f"event: {name}\ndata: {dump_json(value)}\n\n"

    def begin_stream(self, pending: Sequence[PendingRequest]) -> str:
        """Return the events before all text."""
        self.parser = BlockParser(pending[0].format)
        response = self.format_object(None)
        return self.format_event_text(
            "response.created", response=response
        ) + self.format_event_text("response.in_progress", response=response)

    def format_event(self, index: int, event: Event) -> str:
        """Return the events for the progress of the answer."""
        is_cut = event.output is not None and event.output.finish_reason == "length"
        return "".join(
            self.format_change(change, is_cut) for change in self.parser.feed_event(event)
        )

    def format_change(self, change: BlockChange, is_cut: bool) -> str:
        """Return the events for a change of a block."""
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
        """Return the event with the whole response."""
        response = self.format_object(outputs[0])
        return self.format_event_text(f"response.{response['status']}", response=response).encode()

    def format_answer(self, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> bytes:
        """Return the whole response."""
        return dump_json(self.format_object(outputs[0])).encode()

    def format_failure(self, fault: HttpError) -> bytes:
        """Return the event of a response that failed."""
        error = {"code": "server_error", "message": str(fault)}
        response = self.format_object(None, error)
        return self.format_event_text("response.failed", response=response).encode()


def format_part(block: Block) -> ReplyObject:
    """Return the content of the item of a block."""
    part: ReplyObject = {"type": PART_TYPES[block.kind], "text": block.text}
    return part | ({"annotations": [], "logprobs": []} if block.kind == "text" else {})
