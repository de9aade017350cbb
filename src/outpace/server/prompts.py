"""Prompts and infill templates of requests, and limits of their number and size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outpace.api.infill import parse_template
from outpace.constraint.cloze import Hole
from outpace.errors import OptionError
from outpace.server.http_error import CONTEXT_CODE, HttpError
from outpace.server.models import HostedModel
from outpace.server.schema import BaseRequest, ChatRequest, CompletionRequest

MAX_HOLES = 256
"""Maximum number of holes in one template."""
MAX_DISTINCT_REGEXES = 8
"""Maximum number of different patterns in one template; compiling one can take a second."""

TemplateParts = list[str | Hole]


def infill_templates(
    request: ChatRequest | CompletionRequest, limit: int | None
) -> Iterator[tuple[Any, TemplateParts]]:
    """Yield the preceding messages and the infill template for each prompt of a request.

    The template is a whole prompt, or the last message of a chat, which must be the assistant's.

    Args:
        request: The request.
        limit: Maximum number of tokens of an answer.
    """
    if isinstance(request, CompletionRequest):
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                raise template_error("prompt", "must be text with outpace.fill, got token ids")
            yield None, parse_infill_template("prompt", prompt, limit)
        return
    *earlier, last = request.messages
    if last.role != "assistant" or not earlier:
        raise template_error(
            "messages",
            "with outpace.fill, the last message must be the assistant's and contain the holes, "
            "such as {{8}}; at least one message must precede it",
        )
    yield (
        [message.template_message() for message in earlier],
        parse_infill_template("messages", last.text, limit),
    )


def parse_infill_template(field: str, text: str, limit: int | None) -> TemplateParts:
    """Return the parts of a template."""
    try:
        parts = parse_template(text)
    except OptionError as error:
        raise HttpError(400, str(error.with_param(field)), param=field) from None
    holes = [part for part in parts if isinstance(part, Hole)]
    counts = {
        "holes": (len(holes), MAX_HOLES),
        "different regular expressions": (
            len({hole.regex for hole in holes}),
            MAX_DISTINCT_REGEXES,
        ),
        "tokens in all holes": (sum(hole.size for hole in holes), limit),
    }
    for what, (count, maximum) in counts.items():
        if maximum is not None and count > maximum:
            raise template_error(field, f"at most {maximum} {what} are allowed, got {count}")
    return parts


def template_error(field: str, message: str) -> HttpError:
    """Return the error for an invalid template."""
    return HttpError(400, f"{field}: {message}", param=field)


def check_choice_count(request: BaseRequest, choices: int, maximum: int) -> None:
    """Raise `HttpError` for more choices than the model admits, which could never start."""
    if choices > maximum:
        field = "prompt" if isinstance(request, CompletionRequest) else "n"
        message = (
            f"at most {maximum} choices (n per prompt) are allowed for this model, got {choices}"
        )
        raise HttpError(400, f"{field}: {message}", param=field)


def prompt_text(model: HostedModel, prompt: str | Sequence[int]) -> str:
    """Return the text of the prompt of a completion, with special tokens."""
    return prompt if isinstance(prompt, str) else model.text.decode(prompt, special=True)


def request_prompts(
    request: BaseRequest, max_characters: int | None, limit: int | None
) -> Sequence[tuple[Any, Any]]:
    """Return the prompts of a request, each with its infill template or None."""
    if isinstance(request, ChatRequest):
        field, texts = "messages", ["".join(message.text for message in request.messages)]
        prompts: Sequence[Any] = [[message.template_message() for message in request.messages]]
    else:
        assert isinstance(request, CompletionRequest)
        field, prompts = "prompt", request.prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if max_characters is not None and any(len(text) > max_characters for text in texts):
        raise HttpError(
            400,
            f"{field}: prompt is too long: at most {max_characters} characters can fit the maximum "
            "context length",
            param=field,
            code=CONTEXT_CODE,
        )
    if request.extension.fill:
        assert isinstance(request, ChatRequest | CompletionRequest)
        return [*infill_templates(request, limit)]
    return [(prompt, None) for prompt in prompts]
