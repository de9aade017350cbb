"""Scripts of commands for an engine loop, without threads or event loops."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from outpace.api.engine_client import (
    ChargeCallback,
    ConnectionEndedError,
    EngineCommand,
    EngineMessage,
    SubmitCommand,
)
from outpace.api.options import RequestOptions
from outpace.api.output import Event
from outpace.api.parts import PLAIN_FORMAT

PROMPT = [9, 17, 4, 33]


class Script:
    """A connection whose commands come from a generator, one list per round."""

    def __init__(self, rounds: Iterator[list[EngineCommand]]) -> None:
        self.rounds = rounds
        self.messages: list[EngineMessage] = []
        self.waits: list[float | None] = []
        self.charged: list[bool] = []

    def receive_commands(self, seconds: float | None) -> Sequence[EngineCommand]:
        """Return the next commands; the end of the script ends the connection."""
        self.waits.append(seconds)
        if (commands := next(self.rounds, None)) is None:
            raise ConnectionEndedError
        return commands

    def send_messages(
        self, messages: Sequence[EngineMessage], charge: ChargeCallback | None
    ) -> None:
        self.messages += messages
        self.charged.append(charge is not None)

    def report_layer(self, size: float) -> None: ...

    def of(self, number: int) -> list[Event]:
        return [e for e in self.messages if isinstance(e, Event) and e.number == number]

    def ids(self, number: int) -> list[int]:
        """Return the tokens of a request that has been answered."""
        output = self.of(number)[-1].output
        assert output is not None
        return output.ids

    def over(self, number: int) -> bool:
        return any(event.is_last for event in self.of(number))


def submit(
    number: int, model: str = "x", *, streams: bool = False, watched: bool = False, **options: Any
) -> SubmitCommand:
    checked = RequestOptions.of({"max_tokens": 24, **options})
    return SubmitCommand(number, model, PROMPT, PLAIN_FORMAT, checked, streams, watched, None)


def until_over(script: Script, *numbers: int) -> Iterator[list[EngineCommand]]:
    """Yield rounds without commands until requests have ended."""
    limit = time.monotonic() + 60
    while not all(map(script.over, numbers)):
        assert time.monotonic() < limit
        yield []
