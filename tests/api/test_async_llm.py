"""Requests from an event loop: each equals its run alone, and none is left over."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from threading import Event
from typing import Any

import pytest

from helpers import is_idle
from outpace import LLM, AsyncLLM
from outpace.api.engine_client import DrainingError, EngineDiedError, QueueFullError
from outpace.api.engine_thread import EngineThread
from outpace.decoding import Decoding, Forward, Request
from outpace.engine.job import DecodingError
from outpace.methods import APD, D2F, Autoregressive, Diffusion, LeftToRight, Method, Speculative
from refusal import refuses

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
AUTOREGRESSIVE: list[Method] = [Autoregressive(), Speculative(draft="tiny-aux", tokens=3)]
DIFFUSION: list[Method] = [
    APD(verifier="tiny-aux", window=16, lookahead=8),
    LeftToRight(tokens=2, window=8, lookahead=8),
    D2F(block=8),
]
LIMIT = 120
"""Seconds after which something is thought to hang."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-ar")


@pytest.fixture(scope="module")
def dream() -> LLM:
    return LLM("tiny-dream")


@asynccontextmanager
async def serving(llm: LLM, **options: Any) -> AsyncIterator[AsyncLLM]:
    """Yield an `AsyncLLM`, then check that no request and no page is left and close it."""
    served = AsyncLLM(llm, **options)
    try:
        yield served
        await asyncio.wait_for(served.drained(), LIMIT)
    finally:
        served.close()
        served.thread.thread.join(LIMIT)
    assert not served.thread.thread.is_alive()
    assert is_idle(llm.engine)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT))


def options_of(number: int, methods: list[Method]) -> dict[str, Any]:
    rng = Random(number)
    return {
        "method": rng.choice(methods),
        "max_tokens": rng.randint(4, 24),
        "temperature": rng.choice([0.0, 0.8]),
        "seed": number,
    }


def test_many_at_once_are_each_as_alone(llm: LLM, dream: LLM) -> None:
    async def ask(served: AsyncLLM, number: int, methods: list[Method]) -> Any:
        options, way = options_of(number, methods), number % 3
        if way == 0:
            return (await served.generate(QUESTION, **options)).text
        if way == 1:
            return "".join([piece async for piece in served.stream(QUESTION, **options)])
        answer = await served.submit(QUESTION, watched=True, logprobs=True, **options)
        events = [event async for event in answer]
        output = events[-1].output
        assert output is not None
        assert [token for event in events for token in event.ids] == output.ids
        assert [step for event in events for step in event.steps] == output.steps
        assert [score for event in events for score in event.logprobs or ()] == output.logprobs
        assert "".join(event.text for event in events) == output.text
        return output.text

    async def work() -> list[str]:
        thread = EngineThread()
        async with serving(llm, thread=thread) as one, serving(dream, thread=thread) as other:
            found = await asyncio.gather(
                *(
                    ask(served, number, methods)
                    for number in range(9)
                    for served, methods in ((one, AUTOREGRESSIVE), (other, DIFFUSION))
                )
            )
            await one.drained()
            await other.drained()
            thread.close()
            return found

    alone = [
        each.generate(QUESTION, **options_of(number, methods))[0].text
        for number in range(9)
        for each, methods in ((llm, AUTOREGRESSIVE), (dream, DIFFUSION))
    ]
    assert run(work()) == alone


def test_a_canvas_is_shown_while_it_is_filled(dream: LLM) -> None:
    async def work() -> None:
        async with serving(dream) as served:
            answer = await served.submit(
                QUESTION, watched=True, method=Diffusion(block=8), max_tokens=24
            )
            known: dict[int, int] = {}
            committed: list[int] = []
            holes = 0
            async for event in answer:
                committed += event.ids
                for place, token in enumerate(event.canvas, len(committed)):
                    holes += token == -1
                    if token != -1:
                        assert known.setdefault(place, token) == token
            assert holes and known
            whole = {place: token for place, token in known.items() if place < len(committed)}
            assert all(committed[place] == token for place, token in whole.items())

    run(work())


def test_streams_that_are_left_free_their_pages(llm: LLM) -> None:
    async def left(served: AsyncLLM, number: int) -> None:
        stream = served.stream(QUESTION, ignore_eos=True, max_tokens=400, seed=number)
        async for _ in stream:
            break
        if number % 2:
            await stream.aclose()  # type: ignore[attr-defined]

    async def cancelled(served: AsyncLLM, number: int) -> None:
        task = asyncio.create_task(
            served.generate(QUESTION, ignore_eos=True, max_tokens=400, seed=number)
        )
        await asyncio.sleep(0.002 * number)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def work() -> str:
        async with serving(llm) as served:
            others = [
                *(left(served, number) for number in range(8)),
                *(cancelled(served, number) for number in range(8)),
            ]
            output, *_ = await asyncio.gather(served.generate(QUESTION), *others)
            gc.collect()
            return output.text

    assert run(work()) == llm.generate(QUESTION)[0].text


@dataclass(frozen=True, kw_only=True)
class Own(Method):
    """A method that calls a function, then decodes token by token."""

    does: Callable[[Request], None] = field(hash=False)

    def decode(self, request: Request) -> Decoding:
        out = yield Forward(ids=request.ids, start=0, read=request.sample())
        while request.commit(out.tokens):
            self.does(request)
            out = yield Forward(ids=request.ids[-1:], start=len(request) - 1, read=request.sample())


def test_a_request_that_is_left_is_not_decoded_to_its_end(llm: LLM) -> None:
    has_left, calls = Event(), list[int]()

    def wait_at_second_token(request: Request) -> None:
        calls.append(len(request.tokens))
        if len(calls) == 2:
            assert has_left.wait(LIMIT)

    async def work() -> None:
        async with serving(llm) as served:
            answer = await served.submit(
                QUESTION,
                streams=True,
                method=Own(does=wait_at_second_token),
                max_tokens=200,
                ignore_eos=True,
            )
            events = aiter(answer)
            await anext(events)
            await events.aclose()  # type: ignore[attr-defined]
            has_left.set()

    run(work())
    assert len(calls) < 9


def fails(request: Request) -> None:
    """Raise an error after a few tokens."""
    if len(request.tokens) == 3:
        raise RuntimeError("a neighbour that fails")


def test_a_request_that_fails_fails_alone(llm: LLM) -> None:
    async def work() -> list[Any]:
        async with serving(llm) as served:
            streamed = served.stream(QUESTION, method=Own(does=fails))

            async def pieces() -> list[str]:
                return [piece async for piece in streamed]

            return await asyncio.gather(
                served.generate(QUESTION),
                served.generate(QUESTION, method=Own(does=fails)),
                pieces(),
                return_exceptions=True,
            )

    good, bad, worse = run(work())
    assert good.text == llm.generate(QUESTION)[0].text
    assert isinstance(bad, DecodingError) and isinstance(worse, DecodingError)


def test_a_full_queue_refuses(llm: LLM) -> None:
    async def work() -> None:
        llm_of_two = LLM("tiny-ar", max_sequences=2)
        async with serving(llm_of_two, max_waiting=1) as served:
            hand = [await served.submit(QUESTION) for _ in range(3)]
            with pytest.raises(QueueFullError):
                await served.generate(QUESTION)
            texts = {(await answer.output()).text for answer in hand}
            assert texts == {(await served.generate(QUESTION)).text}

    run(work())


def test_bad_input_takes_no_place(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm, max_waiting=0) as served:
            for _ in range(300):
                with refuses("temperature"):
                    await served.generate(QUESTION, temperature=-1)
            assert served.waiting == served.running == 0

    run(work())


def test_draining_takes_nothing_more(llm: LLM) -> None:
    async def work() -> str:
        async with serving(llm) as served:
            answer = await served.submit(QUESTION)
            served.drain()
            with pytest.raises(DrainingError):
                await served.submit(QUESTION)
            return (await answer.output()).text

    assert run(work()) == llm.generate(QUESTION)[0].text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_again_and_again_ends_all(llm: LLM) -> None:
    async def work() -> None:
        broken = LLM("tiny-ar")
        served = AsyncLLM(broken)
        answer = await served.submit(QUESTION)

        def fail(*_: Any) -> bool:
            raise OSError("a device that is lost")

        broken.driver.process_and_step = fail  # type: ignore[method-assign]
        with pytest.raises(EngineDiedError, match="device"):
            await answer.output()
        assert not served.thread.is_alive and isinstance(served.thread.error, OSError)
        with pytest.raises(EngineDiedError):
            await served.submit(QUESTION)
        served.close()

    run(work())
