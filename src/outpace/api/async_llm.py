"""LLM for asyncio: requests come from event loops, and one thread drives the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Unpack

from outpace.api.engine_client import ModelClient
from outpace.api.engine_thread import EngineThread
from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.api.text import Prompt
from outpace.field_types import NonNegativeInt, check_value


class AsyncLLM(ModelClient):
    """An `LLM` that answers many concurrent requests of event loops.

    An `EngineThread` drives the engine. New constraints are compiled in another thread, so only
    their own requests wait for them.

    Args:
        llm: The model.
        thread: Thread that several models with different names share; a new one by default.
        max_waiting: Maximum number of requests that wait for admission, in addition to
            `max_sequences` running ones.

    Raises:
        OptionError: If `max_waiting` is negative.
        ValueError: If `thread` already serves a model of this name.
    """

    def __init__(
        self, llm: LLM, *, thread: EngineThread | None = None, max_waiting: int = 256
    ) -> None:
        check_value("max_waiting", max_waiting, NonNegativeInt)
        self.llm = llm
        self.owns_thread = thread is None
        self.thread = EngineThread() if thread is None else thread
        self.thread.add_model(llm.name, llm)
        limit = llm.engine.max_sequences + max_waiting
        super().__init__(self.thread, llm.name, llm.text, limit)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Output:
        """Answer a prompt; cancelling the task cancels the request.

        Args:
            prompt: Text of a user message, token ids, or chat messages.
            **options: Options of the request, see `Options`.

        Returns:
            The finished output.

        Raises:
            ValueError: For an invalid prompt or option.
            QueueFullError: If `max_waiting` requests are waiting.
            DrainingError: After `drain` or `close`.
            EngineDiedError: If the engine loop has ended.
            DecodingError: If the method or a forward pass fails.
        """
        return await (await self.submit(prompt, **options)).output()

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[str]:
        """Yield the text of an answer as it is committed; leaving the loop cancels the request.

        Args:
            prompt: Text of a user message, token ids, or chat messages.
            **options: Options of the request, see `Options`.

        Yields:
            Pieces of text, each of whole characters. Concatenated they are the answer. Raises as
            `generate` does.
        """
        async for event in await self.submit(prompt, streams=True, **options):
            if event.text:
                yield event.text

    def close(self) -> None:
        """End pending requests with an error, and stop the thread unless it is shared."""
        super().close()
        if self.owns_thread:
            self.thread.close()
        else:
            self.thread.remove_model(self.name)
