"""Requests that end early: disconnects, shutdown, failing methods."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from asking import ask, body_of, chat, events, http_scope, route, text_of
from looped import submit
from outpace import LLM
from outpace.api.engine_thread import EngineThread
from outpace.attention.batch import AttentionBatch
from outpace.methods import D2F
from outpace.models.attention import Attend
from outpace.server.app import build_server_app
from outpace.server.http_error import HttpError
from outpace.server.service import Service
from outpace.server.start import Settings

LONG = chat(model="tiny-aux", max_tokens=400, ignore_eos=True)


class Call:
    """An ASGI request in progress."""

    def __init__(self, app: Any, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.news = asyncio.Event()
        self.body = [json.dumps(body).encode()]
        scope = http_scope(route(body))
        self.task = asyncio.ensure_future(app(scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        """Return the body, then wait until the client disconnects."""
        if self.body:
            return {"type": "http.request", "body": self.body.pop()}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    async def begun(self) -> None:
        while len(self.sent) < 2:
            self.news.clear()
            await self.news.wait()

    @property
    def answer_text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def held(service: Service) -> int:
    return sum(
        each.held_pages for model in service.models.values() for each in model.engine.cache_usage
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("more", [{"stream": True}, {"stream": True, "n": 3}, {}, {"n": 3}])
def test_disconnect_ends_request(service: Service, more: dict[str, Any]) -> None:
    async def run() -> list[Call]:
        app = build_server_app(service)
        goes, stays = Call(app, LONG | more), Call(app, LONG | {"seed": 1, "max_tokens": 60})
        await until(lambda: held(service) > 0)
        if "stream" in more:
            await goes.begun()
        goes.gone.set()
        await goes.task
        await stays.task
        await until(lambda: not held(service))
        again = Call(app, LONG | {"seed": 1, "max_tokens": 60})
        await again.task
        return [goes, stays, again]

    goes, stays, again = asyncio.run(run())
    assert "[DONE]" not in goes.answer_text
    assert json.loads(stays.answer_text)["choices"] == json.loads(again.answer_text)["choices"]
    assert not service.pending


PINGS = {
    "/v1/chat/completions": r": ping\n\n",
    "/v1/completions": r": ping\n\n",
    "/v1/messages": r'event: ping\ndata: \{"type":"ping"\}\n\n',
    "/v1/responses": r'event: keepalive\ndata: \{"type":"keepalive","sequence_number":\d+\}\n\n',
}


@pytest.mark.parametrize("path", PINGS)
def test_silent_streams_send_pings(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    body = body_of(path, "Hi", 40, stream=True)
    silent = client.post(path, json=body).text
    monkeypatch.setattr("outpace.server.request_handler.PING_SECONDS", 1e-5)
    pinged = client.post(path, json=body).text
    assert re.search(PINGS[path], pinged) and not re.search(PINGS[path], silent)
    *_, end = pinged.split("\n\n")[:-1]
    assert "ping" not in end and "keepalive" not in end


def test_aborted_requests_get_an_error(service: Service) -> None:
    async def run() -> tuple[Call, Call]:
        app = build_server_app(service)
        stream, whole = Call(app, LONG | {"stream": True}), Call(app, LONG)
        await stream.begun()
        service.abort_pending(HttpError(503, "the end has come"))
        await stream.task
        await whole.task
        await until(lambda: not held(service))
        return stream, whole

    stream, whole = asyncio.run(run())
    *_, last, nothing = stream.answer_text.split("\n\n")
    assert nothing == "" and whole.sent[0]["status"] == 503
    for text in (last.removeprefix("data: "), whole.answer_text):
        error = json.loads(text)["error"]
        assert (error["message"], error["type"]) == ("the end has come", "unavailable_error")
    assert not service.pending


def broken(self: Any, request: Any) -> Any:
    """A method that fails after its first forward."""
    yield next(WORKING(self, request))
    raise RuntimeError("/secret/place")


WORKING = D2F.decode


@pytest.mark.parametrize("n", [1, 3])
def test_failing_method_fails_only_its_request(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    body = chat(model="tiny-d2f", max_tokens=16, n=n, outpace={"method": "d2f"})
    with monkeypatch.context() as patched:
        patched.setattr(D2F, "decode", broken)
        whole = client.post(route(body), json=body)
        stream = client.post(route(body), json=body | {"stream": True})
    assert whole.status_code == 500
    *_, event, nothing = stream.text.split("\n\n")
    assert nothing == "" and "[DONE]" not in stream.text
    for error in (whole.json()["error"], json.loads(event.removeprefix("data: "))["error"]):
        assert error["type"] == "server_error"
        assert "chatcmpl-" in error["message"] and "secret" not in error["message"]
    assert ask(client, body)["choices"]
    assert not held(service)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 16}, "response.failed"),
        ("/v1/messages", chat("x", max_tokens=16), "error"),
    ],
)
def test_failure_in_other_apis(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], name: str
) -> None:
    body = body | {"model": "tiny-d2f", "outpace": {"method": "d2f"}}
    with monkeypatch.context() as patched:
        patched.setattr(D2F, "decode", broken)
        whole = client.post(path, json=body)
        stream = client.post(path, json=body | {"stream": True})
    assert whole.status_code == 500
    *_, event, nothing = stream.text.split("\n\n")
    head, data = event.split("\ndata: ")
    assert (head, nothing) == (f"event: {name}", "")
    assert "secret" not in whole.text + stream.text
    failed = json.loads(data)
    assert failed["type"] == name
    assert failed.get("response", failed)["error"]["message"].startswith("decoding failed")


@pytest.mark.parametrize(
    "engine",
    [
        {"heartbeat": -1000.0, "error": None, "is_alive": True},
        {"heartbeat": 0.0, "error": None, "is_alive": False},
        {"heartbeat": 0.0, "error": MemoryError("/secret/place"), "is_alive": False},
    ],
)
def test_health_of_hanging_or_dead_engine(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]
) -> None:
    if engine["heartbeat"]:
        engine["heartbeat"] += time.monotonic()
    monkeypatch.setattr(
        service,
        "client",
        SimpleNamespace(update_stats=service.client.update_stats, layer_size=1.0, **engine),
    )
    for response in (
        client.get("/health"),
        client.get("/ready"),
        client.post("/v1/chat/completions", json=chat()),
    ):
        assert response.status_code == 503
        assert "secret" not in response.text
    assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize(("seconds", "hangs"), [([0.12] * 6, False), ([0.72, 0, 0, 0, 0, 0], True)])
def test_a_step_is_alive_while_layers_end(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], hangs: bool
) -> None:
    llm, engine = LLM("tiny-ar"), EngineThread()
    engine.add_model("x", llm)
    service = Service({}, engine, cast(Settings, SimpleNamespace(step_seconds=0.36)))
    backend = llm.target.backend
    plan = backend.plan_pass

    def plan_slow_pass(batch: AttentionBatch) -> Attend:
        attend = plan(batch)
        return lambda layer, *rows: (time.sleep(seconds[layer]), attend(layer, *rows))[1]

    monkeypatch.setattr(backend, "plan_pass", plan_slow_pass)
    engine.send_command(submit(1, max_tokens=1))
    until = time.monotonic() + 1.2
    while not (failure := service.failure) and time.monotonic() < until:
        time.sleep(0.02)
    engine.close()
    assert bool(failure) == hangs


def check_canvases(chunks: list[dict[str, Any]], plain: str) -> list[list[str | None]]:
    """Return the canvases of an answer, whose text before the first hole is that of `plain`."""
    answer_text, canvases = "", []
    for chunk in chunks:
        answer_text += text_of([chunk])
        if "canvas" in chunk.get("outpace", {}):
            assert chunk["choices"] == []
            assert chunk["outpace"]["index"] == 0
            canvases.append(canvas := chunk["outpace"]["canvas"])
            hole = canvas.index(None) if None in canvas else len(canvas)
            assert plain.startswith(answer_text + "".join(canvas[:hole]))
    return canvases


@pytest.mark.parametrize(
    ("method", "options"), [("d2f", {}), ("fast_dllm", {}), ("diffusion", {"order": "random"})]
)
def test_provisional_text_follows_committed(
    client: TestClient, method: str, options: dict[str, Any]
) -> None:
    """In separate events; text before the first hole is committed next.

    A slow reader receives several states as one, so it may miss those with holes in one answer.
    """
    body = chat(model="tiny-d2f", max_tokens=32, temperature=0, seed=1)
    extra = {"method": method, "options": options}
    plain = text_of(events(client, body | {"outpace": extra}))
    canvases: list[list[str | None]] = []
    for _ in range(10):
        chunks = events(client, body | {"outpace": extra | {"provisional": True}})
        assert text_of(chunks) == plain
        canvases = check_canvases(chunks, plain)
        if any(None in canvas and any(canvas) for canvas in canvases):
            break
    assert any(None in canvas and any(canvas) for canvas in canvases)
    assert [a for a, b in zip(canvases, canvases[1:], strict=False) if a == b] == []
