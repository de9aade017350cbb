"""Prompts as users give them: text, token ids or chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as brief
from typing import Any

from numpy import integer, ndarray
from torch import Tensor

from outpace.api.codec import validate_text
from outpace.api.markers import Message
from outpace.api.tools import link_calls
from outpace.errors import OptionError

Prompt = str | Sequence[int] | Sequence[Message] | ndarray | Tensor


def validate_prompt(prompt: Any) -> str | list[Any]:
    """Return a prompt as text, ids or messages; raises `OptionError` if invalid or empty."""
    if isinstance(prompt, ndarray | Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        message = f"prompt must be text, token ids or chat messages, got {brief(prompt)}"
        raise OptionError("prompt", prompt, message)
    if not prompt:
        message = "prompt must not be empty: give text or at least one token"
        raise OptionError("prompt", prompt, message)
    if isinstance(prompt, str):
        return validate_text("prompt", prompt)
    if any(isinstance(each, dict | str) for each in prompt):
        return link_calls([validate_message(f"messages[{n}]", m) for n, m in enumerate(prompt)])
    return [validate_token_id(n, each) for n, each in enumerate(prompt)]


def list_prompts(prompts: Any) -> list[Any]:
    """Return one prompt or many as a list; each row of a 2-D array of ids is a prompt."""
    if isinstance(prompts, ndarray | Tensor):
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return [prompts]
    many = not prompts or isinstance(prompts[0], Sequence | ndarray | Tensor)
    return list(prompts) if many else [prompts]


def validate_token_id(place: int, token: Any) -> int:
    """Return a token id as `int`; raises `OptionError` if it is not an integer."""
    if isinstance(token, bool) or not isinstance(token, int | integer):
        param = f"prompt[{place}]"
        message = f"{param} must be a token id, an integer, got {brief(token)}"
        raise OptionError(param, token, message)
    return int(token)


def validate_message(param: str, message: Any) -> Message:
    """Return the chat message `param` with its text parts joined.

    Raises:
        OptionError: If role or content is not text.
    """
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        parts = (
            read_text_part(f"{param}.content[{n}]", part)
            for n, part in enumerate(message["content"])
        )
        message = {**message, "content": "".join(parts)}
    if isinstance(message, dict) and message.get("tool_calls") and message.get("content") is None:
        message = {**message, "content": ""}
    problem = f"{brief(message)} is not a chat message: give {{'role': …, 'content': text}}"
    if not isinstance(message, dict):
        raise OptionError(param, message, f"{param}: {problem}")
    keys = ["role", "content"]
    if message.get("reasoning_content") is not None:
        keys.append("reasoning_content")
        if message.get("role") != "assistant":
            field = f"{param}.reasoning_content"
            only = f"{field}: only messages of the assistant may have it"
            raise OptionError(field, message["reasoning_content"], only)
    for key in keys:
        field, text = f"{param}.{key}", message.get(key)
        if not isinstance(text, str):
            raise OptionError(field, text, f"{field}: {problem}")
        validate_text(field, text)
    return message


def read_text_part(param: str, part: Any) -> str:
    """Return the text of a message part in OpenAI's format; raises `OptionError` for another."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    message = f"{param}: {brief(part)} is not the text of a chat message"
    raise OptionError(param, part, f"{message}: give {{'type': 'text', 'text': …}}")
