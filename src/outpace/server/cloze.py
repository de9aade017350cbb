"""Texts with holes, as requests give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outpace.api.infill import cloze_of
from outpace.constraint.cloze import Hole
from outpace.errors import OptionError
from outpace.server.fault import Fault
from outpace.server.schema import ChatRequest, CompletionRequest

MOST_HOLES = 256
MOST_REGEXES = 8
"""Different ones of one text, since to read each may take a second."""

Cloze = list[str | Hole]


def clozes_of(
    asked: ChatRequest | CompletionRequest, limit: int | None
) -> Iterator[tuple[Any, Cloze]]:
    """What stands in front of each text with holes, and that text.

    It is the last message of a chat, which is the assistant's, or a whole prompt. `limit` is how
    many tokens an answer may have. Raises `Fault` for what is no such text.
    """
    if isinstance(asked, CompletionRequest):
        for prompt in asked.prompts:
            if not isinstance(prompt, str):
                raise wrong("prompt", "outpace.fill needs text, not token ids")
            yield None, cloze("prompt", prompt, limit)
        return
    *front, last = asked.messages
    if last.role != "assistant" or not front:
        raise wrong(
            "messages",
            "with outpace.fill the last one is the assistant's and has the holes, such as {{8}}; "
            "others stand in front of it",
        )
    yield [message.plain() for message in front], cloze("messages", last.text, limit)


def cloze(field: str, text: str, limit: int | None) -> Cloze:
    """The parts of a text with holes."""
    try:
        parts = cloze_of(text)
    except OptionError as error:
        raise Fault(400, str(error.renamed(field)), param=field) from None
    holes = [part for part in parts if isinstance(part, Hole)]
    counts = {
        "holes": (len(holes), MOST_HOLES),
        "different regular expressions": (len({hole.regex for hole in holes}), MOST_REGEXES),
        "tokens in all holes": (sum(hole.size for hole in holes), limit),
    }
    for what, (count, most) in counts.items():
        if most is not None and count > most:
            raise wrong(field, f"{count} {what}, and at most {most} are taken here")
    return parts


def wrong(field: str, message: str) -> Fault:
    """What is told of a text that cannot be filled."""
    return Fault(400, f"{field}: {message}", param=field)
