"""A submitted request of a model client: its events, its output and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from outpace.api.engine_messages import CancelCommand, RequestProgress
from outpace.api.output import Event, Output, merge_events
from outpace.api.parts import PLAIN_FORMAT
from outpace.decoding import Step

if TYPE_CHECKING:
    from outpace.api.engine_client import ModelClient


class PendingRequest:
    """A submitted request. Iterate over its events, or await its `output`.

    Attributes:
        loop: Event loop that waits for it.
        change_event: Set on progress.
        events: Events that were not consumed yet.
        format: Format of the answer.
        prompt: Token ids of the prompt; none for an infill template.
    """

    def __init__(self, model: ModelClient, number: int) -> None:
        self.model = model
        self.number = number
        self.loop = asyncio.get_running_loop()
        self.change_event = asyncio.Event()
        self.is_admitted = self.is_cancelled = False
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.format, self.prompt = PLAIN_FORMAT, list[int]()
        self.result: Output | None = None
        self.error: BaseException | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events, merging those that are ready; leaving the loop cancels the request."""
        try:
            over = False
            while not over:
                self.raise_error()
                if not self.events:
                    await self.wait_for_change()
                    continue
                events, self.events = self.events, []
                over = events[-1].output is not None
                yield events[0] if len(events) == 1 else merge_events(events)
        finally:
            self.cancel()

    async def output(self) -> Output:
        """Wait for the output; raises the error of the request, if any."""
        try:
            while self.result is None:
                self.raise_error()
                await self.wait_for_change()
            return self.result
        finally:
            self.cancel()

    async def wait_until_admitted(self) -> None:
        """Wait until the engine admits the request; raises the reason if it is rejected."""
        while not self.is_admitted:
            self.raise_error()
            await self.wait_for_change()

    async def wait_for_change(self) -> None:
        """Wait for progress."""
        await self.change_event.wait()
        self.change_event.clear()

    def raise_error(self) -> None:
        """Raise the error of the request, if any."""
        if self.error is not None:
            raise self.error

    def apply_progress(self, progress: RequestProgress) -> None:
        """Apply progress, in the event loop of the request."""
        if progress.error is not None:
            self.fail(progress.error)
            return
        self.is_admitted = True
        if progress.event is not None:
            self.append_event(progress.event, progress.steps)
        self.change_event.set()

    def append_event(self, event: Event, steps: Sequence[Step]) -> None:
        """Append an event, which is sent without its steps, until it is consumed."""
        self.steps += steps
        if event.output is not None:
            self.result = replace(event.output, steps=self.steps)
            self.release_place()
        if self.events:  # only the last canvas is shown
            self.events[-1] = replace(self.events[-1], canvas=())
        self.events.append(replace(event, steps=steps, output=self.result))

    def fail(self, error: BaseException) -> None:
        """End the request with an error, from any thread."""
        self.release_place()
        self.error = error
        with suppress(RuntimeError):  # its event loop may be closed
            self.loop.call_soon_threadsafe(self.change_event.set)

    def cancel(self) -> None:
        """Cancel the request, from any thread and any number of times.

        An admitted request counts against the limit until the engine has freed its memory.
        """
        if not self.is_cancelled and self in self.model.requests:
            self.is_cancelled = True
            self.model.client.send_command(CancelCommand(self.number, self.model.name))
            if not self.is_admitted:
                self.release_place()

    def release_place(self) -> None:
        """Stop counting the request against the limit."""
        self.model.requests.discard(self)
        self.model.client.requests.pop(self.number, None)
