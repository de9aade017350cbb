"""Checks of single values of request options."""

from __future__ import annotations

from typing import Any

from outpace.decoding.sampling_params import is_finite_real, is_whole_number
from outpace.errors import OptionError
from outpace.methods.method import MAX_FLOAT_VALUE, check_type

MAX_TOP_LOGPROBS = 20
"""Maximum number of most probable tokens per token of an answer, as OpenAI's."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Values of `reasoning_effort`, as OpenAI's."""


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Raise `OptionError` for a value that is not an integer from 0 to `most`."""
    if not (is_whole_number(value) and value >= 0 and (most is None or value <= most)):
        allowed = "of at least 0" if most is None else f"from 0 to {most}"
        raise OptionError(name, value, f"{name} must be an integer {allowed}, got {value!r}")


def check_max_tokens(max_tokens: Any, prompt_logprobs: Any) -> None:
    """Raise `OptionError` for an invalid limit, and for 0 unless the prompt is scored."""
    check_type("max_tokens", max_tokens, int | None)
    least = 0 if prompt_logprobs is not None else 1
    if max_tokens is not None and max_tokens < least:
        also = "" if max_tokens else ", or 0 with prompt_logprobs"
        message = f"max_tokens must be at least 1{also}, got {max_tokens}"
        raise OptionError("max_tokens", max_tokens, message)


def check_effort(effort: Any) -> None:
    """Raise `OptionError` for an unknown effort of reasoning."""
    if effort is not None and not (isinstance(effort, str) and effort in EFFORTS):
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r}"
        raise OptionError("reasoning_effort", effort, message)


def check_range(name: str, value: object, least: float, part: str = "") -> None:
    """Raise `OptionError` for a value that is not a number from `least` to `MAX_FLOAT_VALUE`."""
    if not (is_finite_real(value) and least <= float(value) <= MAX_FLOAT_VALUE):  # type: ignore[arg-type]
        message = (
            f"{name}{part} must be a number from {least:g} to {MAX_FLOAT_VALUE:g}, got {value!r}"
        )
        raise OptionError(name, value, message)
