"""Prompts of requests, and limits of their number and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.server.http_error import HttpError
from outpace.server.infill_template import infill_templates
from outpace.server.models import HostedModel
from outpace.server.schema import BaseRequest, ChatRequest, CompletionRequest


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
    """Return the prompts of a request, each with its infill template or None.

    Raises:
        HttpError: If a prompt exceeds `max_characters` or is not a valid template.
    """
    if isinstance(request, ChatRequest):
        field, texts = "messages", ["".join(message.text for message in request.messages)]
        prompts: Sequence[Any] = [[message.template_message() for message in request.messages]]
    else:
        assert isinstance(request, CompletionRequest)
        field, prompts = "prompt", request.prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if max_characters is not None and any(len(text) > max_characters for text in texts):
        message = f"{field}: must have at most {max_characters} characters for this model"
        raise HttpError(400, message, param=field, code="context_length_exceeded")
    if request.extension.fill:
        assert isinstance(request, ChatRequest | CompletionRequest)
        return [*infill_templates(request, limit)]
    return [(prompt, None) for prompt in prompts]
