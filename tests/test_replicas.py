"""Replicas on Ray Serve: the front alone, then two of them that stream, die and drain."""

# ruff: noqa: E402

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from outpace import LLM
from outpace.data.generated.story import story_problems
from outpace.server.http_error import HttpError
from outpace.server.settings import Config, Entry, Settings
from rayed import SECONDS, Program, running

ray = pytest.importorskip("ray.serve", reason="needs the extra ray")

from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from outpace.ray import replicas as ingress
from outpace.ray.replicas import ForwardedResponse, application

HEAD = {"type": "http.response.start", "status": 200, "headers": []}
HALF = {"type": "http.response.body", "body": b"a", "more_body": True}
LAST = {"type": "http.response.body", "body": b"b", "more_body": False}


class Handle:
    """Ray's handle of replicas that are scripted: messages, then how it ends; None never does."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.cancelled = 0

    @property
    def answer(self) -> Handle:
        return self

    def remote(self, *asked: object) -> Handle:
        self.script = self.scripts.pop(0)
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in self.script:
            if each is None:
                await asyncio.Event().wait()
            if isinstance(each, Exception):
                raise each
            yield dict(each)

    def cancel(self) -> None:
        self.cancelled += 1


def passed(handle: Handle, beginning: str = "w", goes: bool = False) -> list[Any]:
    """What a client gets, which stays or goes."""
    sent: list[Any] = []

    async def receive() -> Any:
        if not goes:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(ForwardedResponse(handle, beginning, {}, b"")({}, receive, send))
    return sent


@pytest.mark.parametrize("begun", [[], [HEAD]])
def test_replica_that_ends_before_its_first_word_is_replaced(begun: list[Any]) -> None:
    handle = Handle([*begun, ActorDiedError()], [HEAD, HALF, LAST])
    assert passed(handle) == [HEAD, HALF, LAST]
    assert handle.cancelled == 2


@pytest.mark.parametrize(
    ("scripts", "status"),
    [
        ([[ActorDiedError()]] * ingress.MAX_ATTEMPTS, 503),
        ([[BackPressureError(1, 1)]], 429),
        ([[ray.exceptions.RayServeException("no")]], 503),
    ],
)
def test_what_cannot_be_had_is_a_fault(scripts: list[list[Any]], status: int) -> None:
    with pytest.raises(HttpError) as refused:
        passed(Handle(*scripts))
    assert refused.value.status == status and refused.value.headers["Retry-After"]


@pytest.mark.parametrize(
    ("server", "entry", "named"),
    [({}, {"tensor_parallel": 2}, "tensor_parallel"), ({"host": "0.0.0.0"}, {}, "API key")],
)
def test_what_cannot_be_served_is_refused(server: Any, entry: Any, named: str) -> None:
    models = {"m": Entry(path="tiny-ar", **entry)}
    with pytest.raises(ValueError, match=named):
        application(Config(server=Settings(**server), models=models))


QUESTIONS = [problem.question + "\n" for problem in story_problems("test", 16)]
CHOSEN = {"max_tokens": 64, "temperature": 0.8, "seed": 7}
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.0}


class Served:
    """A server of two replicas."""

    def __init__(self, program: Program, port: int) -> None:
        self.program = program
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, prompt: str, **fields: Any) -> httpx2.Response:
        body = {"model": "tiny-ar", "prompt": prompt, **fields}
        return httpx2.post(f"{self.url}/v1/completions", json=body, timeout=SECONDS)

    def stream(self, prompt: str, times: list[float], **fields: Any) -> list[str]:
        """The events of a stream, whose `times` are noted as they come."""
        body = {"model": "tiny-ar", "prompt": prompt, "stream": True, **fields}
        told = []
        url = f"{self.url}/v1/completions"
        with httpx2.stream("POST", url, json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    told.append(line.removeprefix("data: "))
                    times.append(time.monotonic())
        return told

    def running(self) -> float:
        lines = httpx2.get(f"{self.url}/metrics", timeout=SECONDS).text.splitlines()
        counts = [line for line in lines if line.startswith("outpace_running{")]
        assert counts
        return sum(float(line.rpartition(" ")[2]) for line in counts)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two replicas of a small model."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
    words = ("serve", "tiny-ar", "--replicas", "2", "--port", str(port))
    with running(*words, "--cache-gib", "0.25") as program:
        program.until(lambda: "listening on" in program.told())
        yield Served(program, port)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-ar", cache_gib=0.25)


def said(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


@pytest.mark.nightly
def test_replicas_answer_as_one_process(served: Served, llm: LLM) -> None:
    expected = [output.text for output in llm.generate(QUESTIONS, raw=True, **CHOSEN)]
    with ThreadPoolExecutor(8) as pool:
        whole = [*pool.map(lambda prompt: served.ask(prompt, **CHOSEN), QUESTIONS)]
        streams = [*pool.map(lambda prompt: served.stream(prompt, [], **CHOSEN), QUESTIONS)]
    assert [answer.json()["choices"][0]["text"] for answer in whole] == expected
    assert [said(events) for events in streams] == expected
    assert len({answer.headers["x-outpace-replica"] for answer in whole}) == 2


@pytest.mark.nightly
def test_prompts_that_begin_alike_land_on_one_replica(served: Served) -> None:
    prompts = [(n, f"{n} {QUESTIONS[n % 16] * 4} {end}") for end in range(10) for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda each: served.ask(each[1], max_tokens=1), prompts)
        landed = defaultdict(Counter)
        for (beginning, _), answer in zip(prompts, answers, strict=True):
            landed[beginning][answer.headers["x-outpace-replica"]] += 1
    share = sum(max(counts.values()) for counts in landed.values()) / len(prompts)
    print(f"{share:.1%} of prompts that begin alike on one replica")
    assert share >= 0.95
    assert len(set().union(*landed.values())) == 2


@pytest.mark.nightly
def test_state_and_refusals_are_those_of_one_process(served: Served) -> None:
    for path in ("/health", "/ready", "/v1/models/tiny-ar", "/openapi.json", "/"):
        assert httpx2.get(served.url + path).status_code == 200
    assert served.ask("a", n=99).json()["error"]["param"] == "n"
    assert served.ask("a " * 5000).status_code == 400
    assert served.ask("a" * 3 * 2**20).status_code == 413
    assert httpx2.get(f"{served.url}/nowhere").status_code == 404
    assert httpx2.get(f"{served.url}/health", headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.nightly
def test_replica_that_is_killed_takes_nobody_with_it(served: Served, llm: LLM) -> None:
    """Streams of the other one are whole, its own say that they are not; what had not begun is
    answered by the other. Then there are two again."""
    expected = [output.text for output in llm.generate(QUESTIONS, raw=True, **LONG)]
    times: list[list[float]] = [[] for _ in QUESTIONS]
    with ThreadPoolExecutor(32) as pool:
        streams: list[Future[list[str]]] = [
            pool.submit(served.stream, *each, **LONG) for each in zip(QUESTIONS, times, strict=True)
        ]
        whole = [pool.submit(served.ask, prompt, **LONG) for prompt in QUESTIONS]
        served.program.until(lambda: all(times))
        served.program.kill_one("ServeReplica:outpace:replicas")
        ends = [stream.result(SECONDS) for stream in streams]
        answers = [answer.result(SECONDS) for answer in whole]
    finished = [events[-1] == "[DONE]" for events in ends]
    assert any(finished) and not all(finished)
    for events, text, done in zip(ends, expected, finished, strict=True):
        if done:
            assert said(events) == text
        else:
            assert "replica failed" in json.loads(events[-1])["error"]["message"]
            assert text.startswith(said(events[:-1]))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    again = served.ask(QUESTIONS[0], **CHOSEN)
    assert again.status_code == 200
    served.program.until(lambda: len(served.program.actors("ServeReplica:outpace:replicas")) == 2)


@pytest.mark.nightly
def test_signal_drains(served: Served) -> None:
    times: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(served.stream, QUESTIONS[0], times, **{**LONG, "max_tokens": 100})
        served.program.until(lambda: bool(times))
        served.program.process.terminate()
        assert stream.result(SECONDS)[-1] == "[DONE]"
    assert served.program.process.wait(SECONDS) == 0, served.program.told()
    assert not served.program.actors("")
