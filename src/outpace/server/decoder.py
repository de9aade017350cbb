"""What decodes the requests of one model, in this process or in another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Unpack

from outpace.api.async_llm import Coming
from outpace.api.options import Options
from outpace.api.text import Prompt
from outpace.engine.runner import Usage


class Decoder(Protocol):
    """One model, and those who wait for it.

    Attributes:
        most: requests that may be in hand.
    """

    most: int

    @property
    def running(self) -> int:
        """Requests in the engine."""

    @property
    def waiting(self) -> int:
        """Requests that the engine has not let in yet."""

    @property
    def usage(self) -> Sequence[Usage]:
        """What its caches hold."""

    async def submit(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        watched: bool = False,
        limit: int | None = None,
        **options: Unpack[Options],
    ) -> Coming:
        """Queue a prompt, as `AsyncLLM` does."""

    def drain(self) -> None:
        """Take no more requests; those in hand go on."""


class Driving(Protocol):
    """What drives all engines of a server.

    Attributes:
        error: what ended it, if anything did.
    """

    error: BaseException | None

    @property
    def alive(self) -> bool:
        """Whether it goes on driving."""

    @property
    def heartbeat(self) -> float:
        """Reading of `time.monotonic` when the step that runs now began, 0 between steps."""

    async def join(self) -> None:
        """Hear of it from now on, in the loop that runs."""

    async def measure(self) -> None:
        """Find out what its engines hold now."""

    def close(self) -> None:
        """End it; what is in hand ends with an error."""
