"""Answers as consecutive blocks: thoughts, text, and each call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outpace.api.calls import CallDelta
from outpace.api.output import Event, Output
from outpace.api.parts import AnswerFormat, AnswerParser, PartsDelta


@dataclass(slots=True)
class Block:
    """A block of an answer.

    Attributes:
        number: Number of the block in its answer.
        kind: What it holds.
        name: Function of a call.
        text: Text, or arguments of a call, so far.
    """

    number: int
    kind: Literal["thoughts", "text", "call"]
    name: str = ""
    text: str = ""


class BlockChange(NamedTuple):
    """Begin, new text or end of a block."""

    change: Literal["begin", "text", "end"]
    block: Block
    text: str = ""
    is_last: bool = False
    """Whether the answer ends with the block."""


class BlockParser:
    """Splits a growing answer into blocks. An empty answer has one empty text."""

    def __init__(self, form: AnswerFormat) -> None:
        self.parser = AnswerParser(form)
        self.blocks: list[Block] = []

    def feed_event(self, event: Event) -> Iterator[BlockChange]:
        """Yield the changes by an event of the engine."""
        yield from self.feed(event.text, final=event.output is not None)

    def feed(self, piece: str, *, final: bool) -> Iterator[BlockChange]:
        """Yield the changes by the next piece of the answer."""
        parts = self.parser.feed(piece, final=final)
        yield from self.add_parts(parts)
        if final:
            if not self.blocks:
                yield from self.begin_block("text")
            yield BlockChange("end", self.blocks[-1], is_last=True)

    def add_parts(self, parts: PartsDelta) -> Iterator[BlockChange]:
        """Yield the changes by new parts, which come in this order in every answer."""
        if parts.reasoning:
            yield from self.add_text("thoughts", parts.reasoning)
        if parts.text:
            yield from self.add_text("text", parts.text)
        for delta in parts.calls:
            yield from self.add_call(delta)

    def add_text(self, kind: Literal["thoughts", "text"], text: str) -> Iterator[BlockChange]:
        """Yield the changes by new characters of thoughts or text."""
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self.begin_block(kind)
        yield self.extend_block(text)

    def add_call(self, delta: CallDelta) -> Iterator[BlockChange]:
        """Yield the changes by new characters of a call."""
        if delta.name is not None:
            yield from self.begin_block("call", delta.name)
        if delta.arguments:
            yield self.extend_block(delta.arguments)

    def begin_block(
        self, kind: Literal["thoughts", "text", "call"], name: str = ""
    ) -> Iterator[BlockChange]:
        """End the last block and begin another one."""
        if self.blocks:
            yield BlockChange("end", self.blocks[-1])
        self.blocks.append(Block(len(self.blocks), kind, name))
        yield BlockChange("begin", self.blocks[-1])

    def extend_block(self, text: str) -> BlockChange:
        """Append text to the last block."""
        self.blocks[-1].text += text
        return BlockChange("text", self.blocks[-1], text)


def answer_blocks(output: Output) -> list[Block]:
    """Return the blocks of a finished answer."""
    parser = BlockParser(output.format)
    for _ in parser.feed(output.text, final=True):
        pass
    return parser.blocks
