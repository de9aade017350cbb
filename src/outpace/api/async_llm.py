"""An LLM for asyncio: requests enter from an event loop, and one thread drives the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Unpack

from outpace.api.engine_client import ModelClient
from outpace.api.engine_thread import EngineThread
from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.api.text import Prompt
from outpace.errors import OptionError


class AsyncLLM(ModelClient):
    """An `LLM` that answers many requests of an event loop.

    An `EngineThread` drives its engine: a new one unless `thread` is given, which several models of
    different names may share. At most `max_waiting` requests wait behind those that the engine
    runs. Constraints that are new are read in another thread, so that only those wait for them who
    gave them.
    """

    def __init__(
        self, llm: LLM, *, thread: EngineThread | None = None, max_waiting: int = 256
    ) -> None:
        if max_waiting < 0:
            message = f"max_waiting must be at least 0, not {max_waiting}"
            raise OptionError("max_waiting", max_waiting, message)
        self.llm = llm
        self.owns = thread is None
        self.thread = EngineThread() if thread is None else thread
        self.thread.add(llm.name, llm)
        most = llm.engine.max_sequences + max_waiting
        super().__init__(self.thread, llm.name, llm.text, most)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Output:
        """Answer a prompt; a task that is cancelled cancels its request."""
        return await (await self.submit(prompt, **options)).output()

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[str]:
        """Pieces of an answer as they are committed; leaving the loop cancels the request."""
        async for event in await self.submit(prompt, streams=True, **options):
            if event.text:
                yield event.text

    def close(self) -> None:
        """End requests in hand with an error, and a thread that is not shared."""
        super().close()
        if self.owns:
            self.thread.close()
        else:
            self.thread.remove(self.name)
