"""Errors that name the invalid option, prompt part or constraint."""

from __future__ import annotations

from reprlib import Repr
from typing import Self

VERBS = {"must", "cannot", "needs", "is", "are", "has"}
"""A reason that begins with one continues the name of the option; any other follows a colon."""

MAX_VALUE_CHARACTERS = 200
MAX_INTEGER_BITS = 512


class BoundedRepr(Repr):
    """Representation of values that may be huge, such as a pattern of 100 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_VALUE_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of more than 4300 digits.
        bits = x.bit_length()
        return repr(x) if bits <= MAX_INTEGER_BITS else f"an integer of {bits} bits"


BOUNDED_REPR = BoundedRepr()


def brief(value: object) -> str:
    """Quote a value in at most `MAX_VALUE_CHARACTERS`."""
    text = BOUNDED_REPR.repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 3]}..."


class OptionError(ValueError):
    """Invalid option, prompt, hole or constraint, as in "top_p must be at most 1, got 1.5".

    The message is the name, the reason and, if the reason begins with "must", the value.
    """

    param: str
    """Dotted name of the invalid part: `top_p`, `messages[2].content`, `holes[0]`."""

    value: object
    """The invalid value; None if it is not to be quoted, or was left in another process."""

    reason: str
    """What is allowed, or why the value is not, and the remedy."""

    location: str
    """What precedes the message, such as the line of a file."""

    def __init__(self, param: str, value: object, reason: str, location: str = "") -> None:
        super().__init__(param, value, reason, location)
        self.param, self.value, self.reason, self.location = param, value, reason, location

    def __str__(self) -> str:
        joint = " " if self.reason.partition(" ")[0] in VERBS else ": "
        return f"{self.location}{self.param}{joint}{self.reason_with_value}"

    @property
    def reason_with_value(self) -> str:
        """The message without location and name."""
        if self.value is None or not self.reason.startswith("must "):
            return self.reason
        return f"{self.reason}, got {brief(self.value)}"

    @property
    def option(self) -> str:
        """First part of `param`: `messages` for `messages[2].content`."""
        return self.param.partition(".")[0].partition("[")[0]

    def with_param(self, param: str) -> Self:
        """Return this error under another name: that of a field, or of a model's role."""
        reason = self.reason if self.param == self.option else str(self)
        return type(self)(param, self.value, reason)


def install_extra(extra: str) -> str:
    """Return which extra is needed, and the command that installs it: no index has this package."""
    return f"needs the extra {extra}; in a clone of outpace: pip install '.[{extra}]'"


class ContextError(OptionError):
    """The prompt, with or without its answer, exceeds the model's context length."""


def prefix_error(location: str, error: ValueError) -> ValueError:
    """Return the same error with a location (file line, model name) before its message."""
    if isinstance(error, OptionError):
        location = f"{location}: {error.location}"
        return type(error)(error.param, error.value, error.reason, location)
    return ValueError(f"{location}: {error}")
