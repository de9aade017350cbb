"""Models that are loaded when they are requested: options, files, answers, reports."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from asking import ask, chat, connect, events, refused, text_of
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.engine import cache
from outpace.server import models
from outpace.server.service import Service
from outpace.server.settings import Config, Entry
from running import serving

BODY = chat(model="slow", max_tokens=12, seed=3)


def served(**entries: Entry) -> Service:
    return Service.load(Config(models=entries))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = Path(shutil.copytree(ZOO_FOLDER / "tiny-aux", tmp_path / "secret" / "own"))
    for file in (ZOO_FOLDER / "vocabulary").iterdir():
        shutil.copy(file, own)
    return own


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    own = served(
        slow=Entry(path=str(folder), lazy=True, cache_gib=0.01),
        fast=Entry(path="tiny-aux", cache_gib=0.01),
    )
    yield own
    own.client.close()


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with connect(service) as client:
        yield client


def loaded(client: TestClient) -> dict[str, bool]:
    """Which models the server reports as loaded, which must be the same everywhere."""
    listed = {m["id"]: m["outpace"]["loaded"] for m in client.get("/v1/models").json()["data"]}
    for name, is_loaded in listed.items():
        assert client.get(f"/v1/models/{name}").json()["outpace"]["loaded"] is is_loaded
        line = f'outpace_loaded{{model="{name}"}} {float(is_loaded)}'
        assert line in client.get("/metrics").text.splitlines()
    return listed


def test_first_request_loads_the_model(client: TestClient) -> None:
    assert loaded(client) == {"slow": False, "fast": True}
    assert client.get("/ready").status_code == client.get("/health").status_code == 200
    answer = text_of(events(client, BODY))
    assert answer == ask(client, BODY | {"model": "fast"})["choices"][0]["message"]["content"]
    assert loaded(client) == {"slow": True, "fast": True}
    samples = client.get("/metrics").text
    for name in ("pages", "tokens", "bytes"):
        assert f'outpace_cache_{name}{{model="slow",role="target"}}' in samples
    assert 'outpace_requests_total{method="lookup",model="slow",result="answered"} 1.0' in samples


def test_an_unknown_model_or_bad_field_loads_nothing(client: TestClient) -> None:
    refused(client, BODY | {"model": "other"}, 404)
    refused(client, BODY | {"top_p": 7})
    refused(client, BODY | {"outpace": {"method": "d2f"}})
    reply = client.post("/tokenize", json={"model": "slow", "messages": BODY["messages"]})
    assert reply.json()["count"] > 5
    assert loaded(client) == {"slow": False, "fast": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_load_is_503_with_its_reason(
    client: TestClient, folder: Path, stream: bool
) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "elsewhere")
    error = refused(client, BODY | {"stream": stream}, 503)
    assert "model.safetensors" in error["message"] and "secret" not in error["message"]
    assert client.get("/ready").status_code == 200
    (folder / "elsewhere").rename(weights)
    assert ask(client, BODY)["choices"]


def test_a_server_that_stops_ends_waiting_requests(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Event()
    monkeypatch.setattr(models, "load_served_model", lambda entry: gate.wait(60))
    request = service.models["slow"].engine.submit("Hello")

    async def ask_and_stop() -> None:
        task = asyncio.ensure_future(request)
        while not service.client.requests:
            await asyncio.sleep(0.01)
        service.drain()
        service.client.close()
        await task

    with pytest.raises(Exception, match="closed"):
        asyncio.run(ask_and_stop())
    gate.set()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"keep": "10m", "lazy": False}, "keep"),
        *(({"keep": keep}, "keep") for keep in ("10", "-1s", "1.5h", "\u0663m", "1m\n")),
        ({"tensor_parallel": 2}, "lazy"),
        ({"quantize": "zip"}, "quantize"),
        ({"dtype": "int3"}, "dtype"),
        ({"device": "abacus"}, "device"),
        ({"attention": "none"}, "attention"),
        ({"pace": "fast"}, "pace"),
        ({"graphs": True, "device": "cpu"}, "graphs"),
        ({"method": "d2f"}, "method"),
        ({"adapter": "nowhere"}, "nowhere"),
    ],
)
def test_options_are_checked_at_the_start(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^model slow: .*{named}"):
        served(slow=Entry(path="tiny-aux", **{"lazy": True, **given}))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_memory_of_a_cache_is_known_before_the_model_is_loaded(
    quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "USUAL_BYTES", 1)
    entry = Entry(path="tiny-aux", lazy=True, quantize=quantize)
    model = models.load_served_model(entry)
    taken = model.target.cache_usage.total_bytes
    assert models.make_lazy_model(entry, lambda: model).cache_bytes == taken


@pytest.mark.nightly
def test_a_server_process_loads_and_unloads() -> None:
    words = ("--lazy", "--keep", "1s", "--cache-gib", "0.1", "--drain-seconds", "60")
    with serving("--model", "slow=tiny-aux", *words) as process:
        assert "slow: causal model, lookup, loaded when requested\n" in process.log
        statuses: list[int] = []

        def is_loaded() -> bool:
            described = httpx2.get(f"{process.url}/v1/models/slow").json()
            return bool(described["outpace"]["loaded"])

        def ask_slow() -> None:
            url = f"{process.url}/v1/chat/completions"
            statuses.append(httpx2.post(url, json=BODY, timeout=60).status_code)

        assert not is_loaded() and httpx2.get(f"{process.url}/ready").status_code == 200
        ask_slow()
        assert is_loaded()
        limit = time.monotonic() + 30
        while is_loaded():
            assert time.monotonic() < limit
            time.sleep(0.05)
        thread = Thread(target=ask_slow)
        thread.start()
        while 'outpace_waiting{model="slow"} 0.0' in httpx2.get(f"{process.url}/metrics").text:
            assert len(statuses) == 1
        assert process.end() == 0
        thread.join()
        assert statuses == [200, 200]
    assert "unloading slow: idle for 1 s\n" in process.log
