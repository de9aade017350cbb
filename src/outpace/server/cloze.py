"""Infill templates of requests: texts with holes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outpace.api.infill import cloze_of
from outpace.constraint.cloze import Hole
from outpace.errors import OptionError
from outpace.server.fault import Fault
from outpace.server.schema import ChatRequest, CompletionRequest

MOST_HOLES = 256
"""Maximum number of holes in one template."""
MOST_REGEXES = 8
"""Maximum number of different patterns in one template; compiling one can take a second."""

Cloze = list[str | Hole]


def clozes_of(
    request: ChatRequest | CompletionRequest, limit: int | None
) -> Iterator[tuple[Any, Cloze]]:
    """Yield the preceding messages and the infill template for each prompt of a request.

    The template is a whole prompt, or the last message of a chat, which must be the assistant's.

    Args:
        request: The request.
        limit: Maximum number of tokens of an answer.

    Raises:
        HttpError: If a prompt is not a valid template.
    """
    if isinstance(request, CompletionRequest):
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                raise wrong("prompt", "must be text with outpace.fill, got token ids")
            yield None, cloze("prompt", prompt, limit)
        return
    *earlier, last = request.messages
    if last.role != "assistant" or not earlier:
        raise wrong(
            "messages",
            "with outpace.fill, the last message must be the assistant's and contain the holes, "
            "such as {{8}}; at least one message must precede it",
        )
    yield [message.plain() for message in earlier], cloze("messages", last.text, limit)


def cloze(field: str, text: str, limit: int | None) -> Cloze:
    """Return the parts of a template."""
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
    for what, (count, maximum) in counts.items():
        if maximum is not None and count > maximum:
            raise wrong(field, f"at most {maximum} {what} are allowed, got {count}")
    return parts


def wrong(field: str, message: str) -> Fault:
    """Return the error for an invalid template."""
    return Fault(400, f"{field}: {message}", param=field)
