"""Errors that name the option, the part of a prompt or the constraint that is at fault."""

from __future__ import annotations

from typing import Self


class OptionError(ValueError):
    """An invalid option, prompt, hole or constraint; its text begins with the name of that.

    Attributes:
        param: the dotted name of what is at fault: `top_p`, `messages[2].content`, `holes[0]`.
        value: what was given there; None where the error comes from another process.
    """

    def __init__(self, param: str, value: object, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.value = value

    @property
    def option(self) -> str:
        """The first part of `param`: `messages` of `messages[2].content`."""
        return self.param.partition(".")[0].partition("[")[0]

    def renamed(self, param: str) -> Self:
        """The same error under another name: that of a field, or of the role of a model."""
        plain = str(self).removeprefix(f"{self.option}: ")
        return type(self)(param, self.value, f"{param}: {plain}")

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, object, str]]:
        """Pickle it with its name and value, and not with its text alone."""
        return type(self), (self.param, self.value, str(self))


class ContextError(OptionError):
    """A prompt, or the answer that may follow it, for which the context of a model is too short."""


def prefixed(place: str, error: ValueError) -> ValueError:
    """The same error with its place in front: a line of a file, or the name of a model."""
    message = f"{place}: {error}"
    if isinstance(error, OptionError):
        return type(error)(error.param, error.value, message)
    return ValueError(message)
