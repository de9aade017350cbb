"""Range checks of options, shared by several methods."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from outpace.decoding import OptionError


def check_at_least_one(**options: int | None) -> None:
    """Raise `OptionError` for a count below one."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise OptionError(name, value, f"{name} must be at least 1, got {value}")


def check_fraction(**options: float | None) -> None:
    """Raise `OptionError` for an option outside [0, 1]."""
    for name, value in options.items():
        if value is not None and not 0 <= value <= 1:
            raise OptionError(name, value, f"{name} must be between 0 and 1, got {value}")


def check_positive_fraction(**options: float | None) -> None:
    """Raise `OptionError` for an option outside (0, 1]."""
    for name, value in options.items():
        if value is not None and not 0 < value <= 1:
            message = f"{name} must be above 0 and at most 1, got {value}"
            raise OptionError(name, value, message)


def check_not_negative(**options: float | None) -> None:
    """Raise `OptionError` for an option below zero."""
    for name, value in options.items():
        if value is not None and value < 0:
            raise OptionError(name, value, f"{name} must be at least 0, got {value}")


def check_default(method: Any, *names: str, reason: str) -> None:
    """Raise `OptionError` for a set option that has no effect together with another."""
    defaults = {option.name: option.default for option in fields(method)}
    for name in names:
        if (value := getattr(method, name)) != defaults[name]:
            message = f"{name} cannot be used with {reason}, got {value!r}: leave it unset"
            raise OptionError(name, value, message)
