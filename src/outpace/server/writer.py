"""Interface between request handlers and the APIs in whose form they answer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import ValidationError

from outpace.api.engine_client import PendingRequest
from outpace.api.output import Event, Output
from outpace.api.parts import CallDelta, PartsDelta
from outpace.server.guard import validation_http_error
from outpace.server.http_error import HttpError
from outpace.server.models import HostedModel
from outpace.server.schema import ChatRequest


class AnswerWriter(ABC):
    """Format of everything that is sent for one request."""

    id: str

    @abstractmethod
    def begin_stream(self, pending: Sequence[PendingRequest]) -> str:
        """Return the events before all text, of the choices that were submitted."""

    @abstractmethod
    def format_ping(self) -> str:
        """Return what shows that a silent stream is alive."""

    @abstractmethod
    def format_event(self, index: int, event: Event) -> str:
        """Return the events for the progress of a choice."""

    @abstractmethod
    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        """Return the events after all text."""

    @abstractmethod
    def format_answer(self, outputs: Sequence[Output], prompts: Sequence[Sequence[int]]) -> bytes:
        """Return the whole answer as one object; `prompts` are the token ids of each choice's."""

    def streams_refusal(self, fault: HttpError) -> bool:
        """Return whether clients expect a refusal as the only event of a stream."""
        return False

    @abstractmethod
    def format_failure(self, fault: HttpError) -> bytes:
        """Return the last event of a stream that fails."""


class Translation(ABC):
    """A request of another API, as a chat request."""

    RENAMED_FIELDS: ClassVar[Mapping[str, str]]
    """Patterns of field paths of chat requests, and the paths of this API."""
    request: ChatRequest

    @abstractmethod
    def open_writer(self, model: HostedModel, number: int) -> AnswerWriter:
        """Return the writer of the answer; `number` is the random number of the request."""

    def rename_fault(self, fault: HttpError) -> HttpError:
        if fault.param is None:
            return fault
        name = rename_field(fault.param, self.RENAMED_FIELDS)
        text = str(fault)
        if text.startswith(fault.param):
            # These APIs have no `param`: a colon ends the name of the field.
            rest = text.removeprefix(fault.param)
            text = f"{name}{':' if rest.startswith(' ') else ''}{rest}"
        return HttpError(fault.status, text, param=name, code=fault.code, headers=fault.headers)

    @contextmanager
    def rename_faults(self) -> Iterator[None]:
        """Let errors name the fields of this API."""
        try:
            yield
        except HttpError as fault:
            if type(fault) is not HttpError:
                raise  # the client has disconnected
            raise self.rename_fault(fault) from None


def rename_field(param: str, names: Mapping[str, str]) -> str:
    for pattern, name in names.items():
        if re.match(pattern, param):
            return re.sub(pattern, name, param, count=1)
    return param


def build_chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return a chat request without the fields that are None; raises `HttpError` if invalid."""
    try:
        return ChatRequest.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise validation_http_error(error) from None


@dataclass(slots=True)
class Block:
    """A block of an answer."""

    number: int
    kind: Literal["thoughts", "text", "call"]
    name: str = ""
    text: str = ""
    """Text, or arguments of a call, so far."""


class BlockChange(NamedTuple):
    """Begin, new text or end of a block."""

    change: Literal["begin", "text", "end"]
    block: Block
    text: str = ""
    is_last: bool = False
    """Whether the answer ends with the block."""


class BlockBuilder:
    """Arranges the parts of a growing answer in blocks. An empty answer has one empty text."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add_event(self, event: Event) -> Iterator[BlockChange]:
        yield from self.add_parts(event.parts)
        if event.output is not None:
            if not self.blocks:
                yield from self.begin_block("text")
            yield BlockChange("end", self.blocks[-1], is_last=True)

    def add_parts(self, parts: PartsDelta) -> Iterator[BlockChange]:
        if parts.reasoning:
            yield from self.add_text("thoughts", parts.reasoning)
        if parts.text:
            yield from self.add_text("text", parts.text)
        for delta in parts.calls:
            if delta.name is not None:
                yield from self.begin_block("call", delta.name)
            if delta.arguments:
                yield self.extend_block(delta.arguments)

    def add_text(self, kind: Literal["thoughts", "text"], text: str) -> Iterator[BlockChange]:
        """Yield the changes by new characters of thoughts or text."""
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self.begin_block(kind)
        yield self.extend_block(text)

    def begin_block(
        self, kind: Literal["thoughts", "text", "call"], name: str = ""
    ) -> Iterator[BlockChange]:
        if self.blocks:
            yield BlockChange("end", self.blocks[-1])
        self.blocks.append(Block(len(self.blocks), kind, name))
        yield BlockChange("begin", self.blocks[-1])

    def extend_block(self, text: str) -> BlockChange:
        self.blocks[-1].text += text
        return BlockChange("text", self.blocks[-1], text)


def answer_blocks(output: Output) -> list[Block]:
    builder, parts = BlockBuilder(), output.parts
    calls = [CallDelta(number, *call) for number, call in enumerate(parts.calls)]
    whole = PartsDelta(parts.reasoning, parts.text, calls)
    for _ in builder.add_event(Event(number=0, parts=whole, output=output)):
        pass
    return builder.blocks
