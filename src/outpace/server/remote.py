"""A model that another process decodes, as `AsyncLLM` is one of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from outpace.api.async_llm import Coming, check_open
from outpace.api.output import Event, Output
from outpace.api.text import Prompt, Text
from outpace.constraint.compiler import DEEPEST
from outpace.decoding import Step
from outpace.engine.runner import Usage
from outpace.errors import OptionError
from outpace.server.plant import Asked, Cancelled, News

if TYPE_CHECKING:
    from outpace.server.child import Child


class RemoteAnswer(Coming):
    """A request on its way in the other process."""

    def __init__(self, owner: Remote, number: int) -> None:
        super().__init__()
        self.owner = owner
        self.number = number
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending: list[Event] = []
        self.steps: list[Step] = []
        self.ended: Output | None = None
        self.error: BaseException | None = None

    def latest(self) -> Event | None:
        """All events since the one before, as one; raises what ended it."""
        if self.error is not None:
            raise self.error
        pending, self.pending = self.pending, []
        return pending[0] if len(pending) == 1 else joined(pending) if pending else None

    def outcome(self) -> Output | None:
        """What became of it; raises what its method raised."""
        if self.error is not None:
            raise self.error
        return self.ended

    def take(self, news: News) -> None:
        """Note what is new."""
        if news.error is not None:
            news.error.__cause__ = news.cause
            self.fail(news.error)
        elif news.event is None:
            if not self.admitted.done():
                self.admitted.set_result(None)
        else:
            self.add(news.event, [Step(*fields) for fields in news.steps])

    def add(self, event: Event, steps: list[Step]) -> None:
        """Note an event, which comes without its steps."""
        self.steps += steps
        if event.output is not None:
            self.ended = replace(event.output, steps=self.steps)
            self.leave()
        if self.pending:  # only the last canvas is ever shown
            self.pending[-1] = replace(self.pending[-1], canvas=())
        self.pending.append(replace(event, steps=steps, output=self.ended))
        self.news.set()

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        self.leave()
        self.error = error
        if not self.admitted.done():
            self.admitted.set_exception(error)
        self.news.set()

    def cancel(self) -> None:
        """End it where it is, as often as one likes."""
        if self.leave():
            self.owner.child.send(Cancelled(self.number))

    def leave(self) -> bool:
        """Be in hand no more; whether it was."""
        was = self.owner.child.hand.pop(self.number, None) is not None
        self.owner.hand -= was
        return was


def joined(events: Sequence[Event]) -> Event:
    """Events that came one after the other, as one."""
    scored = events[0].logprobs is not None
    return Event(
        text="".join(event.text for event in events),
        ids=[token for event in events for token in event.ids],
        chosen=sum(event.chosen for event in events),
        logprobs=[score for event in events for score in event.logprobs or ()] if scored else None,
        steps=[step for event in events for step in event.steps],
        canvas=events[-1].canvas,
        output=events[-1].output,
    )


class Remote:
    """One model of the process that decodes; `most` requests of it may be in hand."""

    def __init__(self, child: Child, model: str, text: Text, most: int) -> None:
        self.child = child
        self.model = model
        self.text = text
        self.most = most
        self.tokenising = ThreadPoolExecutor(1, thread_name_prefix="outpace-prompts")
        self.hand = 0
        self.draining = False

    @property
    def running(self) -> int:
        """Requests in the engine, when it was last heard of."""
        return self.child.engines[self.model][0]

    @property
    def waiting(self) -> int:
        """Requests that the engine has not let in yet."""
        return max(self.hand - self.running, 0)

    @property
    def usage(self) -> Sequence[Usage]:
        """What its caches hold, when they were last heard of."""
        return self.child.engines[self.model][1]

    async def submit(
        self,
        prompt: Prompt | None,
        *,
        streams: bool = False,
        watched: bool = False,
        raw: bool = False,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RemoteAnswer:
        """Queue a prompt; raises as `AsyncLLM` does. What is too much is refused here."""
        self.child.check()
        check_open(self.model, self.draining, self.hand, self.most)
        answer = RemoteAnswer(self, self.child.number())
        self.child.hand[answer.number] = answer
        self.hand += 1
        try:
            if prompt is not None:
                encode = partial(self.text.encode, prompt, raw=raw, template=template)
                loop = asyncio.get_running_loop()
                prompt = await loop.run_in_executor(self.tokenising, encode)
            asked = Asked(answer.number, self.model, prompt, streams, watched, options)
            self.child.send(asked)
            await answer.admitted
        except RecursionError:
            answer.cancel()
            told = f"schema: it is too large: it is nested more than {DEEPEST} deep"
            raise OptionError("schema", None, told) from None
        except BaseException:
            answer.cancel()
            raise
        return answer

    def drain(self) -> None:
        """Take no more requests; those in hand go on."""
        self.draining = True
