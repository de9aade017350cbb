"""Bounds that options of several methods have in common."""

from __future__ import annotations

from outpace.decoding import OptionError


def at_least_one(**options: int | None) -> None:
    """Raise `OptionError` for an option that counts something and is below one."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise OptionError(name, value, f"{name} must be at least 1, not {value}")


def fraction(**options: float) -> None:
    """Raise `OptionError` for an option that is a share of a whole and lies outside [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise OptionError(name, value, f"{name} must lie between 0 and 1, not {value}")


def positive_fraction(**options: float | None) -> None:
    """Raise `OptionError` for an option outside (0, 1]."""
    for name, value in options.items():
        if value is not None and not 0 < value <= 1:
            message = f"{name} must lie above 0 and be at most 1, not {value}"
            raise OptionError(name, value, message)


def not_negative(**options: float | None) -> None:
    """Raise `OptionError` for an option below zero."""
    for name, value in options.items():
        if value is not None and value < 0:
            raise OptionError(name, value, f"{name} must be 0 or a positive number, not {value}")
