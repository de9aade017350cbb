"""Messages between an engine loop and its clients: commands, progress, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from outpace.api.output import Event
from outpace.decoding import Step
from outpace.engine.stats import Stats


class QueueFullError(RuntimeError):
    """Too many requests are in flight."""


class LoadError(RuntimeError):
    """A model could not be loaded for a request; the next request tries again."""


class ConnectionEndedError(Exception):
    """No more commands can arrive."""


class SubmitCommand(NamedTuple):
    """Command to run a request.

    Attributes:
        number: Number of the request.
        model: Name of the model.
        prompt: Token ids, or None for an infill template without a prompt.
        streams: Whether to send events before the last one.
        watched: Whether to send an event with the canvas after every forward.
        options: Options of the request by name.
    """

    number: int
    model: str
    prompt: list[int] | None
    streams: bool
    watched: bool
    options: dict[str, Any]


class CancelCommand(NamedTuple):
    """Command to cancel a request; if it was admitted, its last event is still sent."""

    number: int
    model: str


class RemoveCommand(NamedTuple):
    """Command to remove a model and all its requests, without a last event."""

    model: str


class InspectCommand(NamedTuple):
    """Command to send the statistics of all engines."""


EngineCommand = SubmitCommand | CancelCommand | RemoveCommand | InspectCommand


class RequestProgress(NamedTuple):
    """Progress of a request; without event and error, it was admitted.

    Attributes:
        number: Number of the request.
        event: New event, without its steps.
        steps: Steps since the previous progress.
        error: Error that ended the request.
    """

    number: int
    event: Event | None = None
    steps: Sequence[Step] = ()
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether no more progress follows."""
        return self.error is not None or self.event is not None and self.event.output is not None


EngineMessage = RequestProgress | dict[str, Stats]

ChargeCallback = Callable[[float], None]
"""Receives the CPU seconds that a notification has cost."""


class CommandConnection(Protocol):
    """Connection of an engine loop to its clients."""

    def receive_commands(self, seconds: float | None) -> Sequence[EngineCommand]:
        """Wait up to `seconds` for commands. Raises `ConnectionEndedError`."""

    def send_messages(
        self, messages: Sequence[EngineMessage], charge: ChargeCallback | None
    ) -> None:
        """Send messages, and `charge` their cost elsewhere; raises `ConnectionEndedError`."""
