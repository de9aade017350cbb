"""Errors that name the invalid option, prompt part or constraint."""

from __future__ import annotations

from typing import Self


class OptionError(ValueError):
    """Invalid option, prompt, hole or constraint. The message begins with its name.

    Attributes:
        param: Dotted name of the invalid part: `top_p`, `messages[2].content`, `holes[0]`.
        value: The invalid value; None for errors received from another process.
    """

    def __init__(self, param: str, value: object, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.value = value

    @property
    def option(self) -> str:
        """First part of `param`: `messages` for `messages[2].content`."""
        return self.param.partition(".")[0].partition("[")[0]

    def with_param(self, param: str) -> Self:
        """Return this error under another name: that of a field, or of a model's role."""
        message = str(self).removeprefix(f"{self.option}: ").removeprefix(f"{self.option} ")
        return type(self)(param, self.value, f"{param}: {message}")

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, object, str]]:
        """Pickle the name and the value along with the message."""
        return type(self), (self.param, self.value, str(self))


def must(param: str, value: object, requirement: str) -> OptionError:
    """Return the error of an option that must meet a requirement: `be between 0 and 1`."""
    return OptionError(param, value, f"{param} must {requirement}, got {value}")


def install_extra(extra: str) -> str:
    """Return which extra is needed, and the command that installs it: no index has this package."""
    return f"needs the extra {extra}; in a clone of outpace: pip install '.[{extra}]'"


class ContextError(OptionError):
    """The prompt, with or without its answer, exceeds the model's context length."""


def prefix_error(location: str, error: ValueError) -> ValueError:
    """Return the same error with a location (file line, model name) before its message."""
    message = f"{location}: {error}"
    if isinstance(error, OptionError):
        return type(error)(error.param, error.value, message)
    return ValueError(message)
