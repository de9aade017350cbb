"""`outpace benchmark serve` as typed by a user, with a scripted server."""

import asyncio
import json
import signal
import subprocess
import sys
from functools import partial

import pytest

from scripted import ScriptedServer

SMALL = ("--concurrency", "2", "--requests", "6", "--warmup", "3")


async def answer(asked, reply):
    """Return ten tokens in two events of five forwards, after 20 ms and 20 ms apart."""
    reply.start()
    await asyncio.sleep(0.02)
    reply.text("a")
    await asyncio.sleep(0.02)
    reply.text("b")
    reply.finish(10, forwards=5)


@pytest.fixture
def serve(outpace):
    """Return a function that runs `outpace benchmark serve`: exit status, output, errors."""
    return partial(outpace, "benchmark", "serve")


def test_levels_are_measured_and_written_with_provenance(serve, tmp_path):
    path = tmp_path / "new" / "a.json"
    with ScriptedServer(answer) as server:
        status, out, _ = serve(
            *(server.url, "--concurrency", "1,4", "--requests", "8", "--warmup", "3"),
            *("--goodput", "ttft=5000,gap=5000", "--output", str(path)),
        )
        assert status == 0 and server.most == 4
        assert len(server.asked) == 1 + 2 * (3 + 8)
    written = json.loads(path.read_text())
    assert written["provenance"]["outpace"] and written["model"] == "m"
    assert written["not_counted"] == {"first_requests": 1, "warmup_requests_of_each_level": 3}
    assert not written["interrupted"]
    one, four = written["levels"]
    assert (one["concurrency"], four["concurrency"]) == (1, 4)
    for level in (one, four):
        assert (level["requests"], level["completed"], level["unfinished"]) == (8, 8, 0)
        assert level["output_tokens"] == 80
        assert level["tokens_per_event"]["mean"] == 5 and level["tokens_per_forward"]["mean"] == 2
        assert level["ttft_ms"]["p50"] > 19 and level["e2e_ms"]["p50"] > 39
        assert level["goodput"]["share"] == 1
        assert level["tokens_per_second"] == pytest.approx(80 / level["seconds"], rel=0.01)
    assert four["tokens_per_second"] > one["tokens_per_second"]
    assert "tokens per second" in out and "TTFT p99, ms" in out and "goodput" in out


def test_requests_are_openai_s_and_no_prompt_comes_twice(serve):
    with ScriptedServer(answer) as server:
        words = ("--max-tokens", "32", "--temperature", "0", "--ignore-eos", "--seed", "5")
        assert serve(server.url, *SMALL, *words)[0] == 0
        bodies = [asked.body for asked in server.asked]
        assert {asked.path for asked in server.asked} == {"/v1/chat/completions"}
    assert {body.pop("seed") for body in bodies} == set(range(5, 15))
    prompts = [body.pop("messages")[0]["content"] for body in bodies]
    assert len(set(prompts)) == len(prompts) == 10
    same = {"model": "m", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
    assert all(body == same | {"stream_options": {"include_usage": True}} for body in bodies)


@pytest.mark.nightly
def test_an_open_loop_sends_at_its_rate(serve, tmp_path):
    path = tmp_path / "a.json"
    with ScriptedServer(answer) as server:
        words = ("--rate", "20,100", "--requests", "20", "--output", str(path))
        assert serve(server.url, *words)[0] == 0
        times = [asked.time for asked in server.asked]
    slow, fast = json.loads(path.read_text())["levels"]
    assert (slow["rate"], fast["rate"]) == (20, 100)
    assert times[28] - times[9] > 0.4
    assert fast["requests_per_second"] > slow["requests_per_second"]


def test_failures_are_counted_by_kind(serve, tmp_path):
    path = tmp_path / "a.json"

    async def script(asked, reply):
        if asked.number % 4 == 2:
            return reply.refuse(503, "draining")
        if asked.number % 4 == 3:
            reply.start()
            reply.text("a")
            await asyncio.sleep(0.01)
            return reply.drop()
        await answer(asked, reply)

    with ScriptedServer(script) as server:
        words = ("--concurrency", "1", "--requests", "16", "--warmup", "0", "--output", str(path))
        status, out, _ = serve(server.url, *words)
    (level,) = json.loads(path.read_text())["levels"]
    assert status == 0 and level["errors"] == {"503": 4, "dropped": 4}
    assert (level["completed"], level["output_tokens"]) == (8, 80)
    assert "failed: dropped" in out


def test_where_every_request_fails_the_status_says_so(serve, tmp_path):
    path = tmp_path / "a.json"

    async def script(asked, reply):
        await answer(asked, reply) if asked.number == 0 else reply.refuse(500, "no")

    with ScriptedServer(script) as server:
        status, _, err = serve(server.url, *SMALL, "--output", str(path))
    assert status == 2 and err == "outpace: all requests failed: 6 500\n"
    assert json.loads(path.read_text())["levels"][0]["errors"] == {"500": 6}


def test_the_key_is_nowhere_to_be_read(serve, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", ["outpace", "--api-key", "sesame", "--x=sesame"])
    with ScriptedServer(answer) as server:
        _, out, _ = serve(server.url, *SMALL, "--api-key", "sesame", "--output", str(path))
        assert server.asked[0].headers["authorization"] == "bearer sesame"
    assert "sesame" not in path.read_text() + out and "--api-key" in path.read_text()


async def unauthorised(asked, reply):
    reply.refuse(401, "no key")


async def unknown(asked, reply):
    reply.refuse(404, "no model 'm'; there is x")


async def no_stream(asked, reply):
    reply.whole({"choices": [{"message": {"content": "x"}}]})


async def no_usage(asked, reply):
    reply.start()
    reply.text("a")
    reply.raw(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (unauthorised, "--api-key"),
        (unknown, "no model 'm'; there is x"),
        (no_stream, "application/json"),
        (no_usage, "include_usage"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_line(refused, tmp_path, script, name):
    with ScriptedServer(script) as server:
        path = tmp_path / "a.json"
        assert name in refused("benchmark", "serve", server.url, *SMALL, "--output", path)
        assert len(server.asked) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("nowhere", "address"),
        ("http://127.0.0.1:1", "connect"),
        ("http://x --rate nan", "rate"),
        ("http://x --concurrency 0", "concurrency"),
        ("http://x --concurrency 1 --rate 1", "combined"),
        ("http://x --warmup -1", "warmup"),
        ("http://x --goodput itl=3", "goodput"),
        ("http://x --api-key a\x01b", "ASCII"),
        ("http://x --model m --prompts none.jsonl", "none.jsonl"),
        ("http://x --method nonsense", "autoregressive"),
        ("http://x --method apd --ratio much", "ratio"),
    ],
)
def test_invalid_words_are_named_in_one_line(refused, words, name):
    assert name in refused("benchmark", "serve", *words.split())


def test_without_its_library_the_extra_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in [name for name in sys.modules if name.startswith("outpace.lab.client")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install '.[load]'" in refused("benchmark", "serve", "http://x")


@pytest.mark.nightly
def test_ctrl_c_writes_what_is_there(tmp_path):
    path = tmp_path / "a.json"

    async def script(asked, reply):
        if asked.number == 30:
            program.send_signal(signal.SIGINT)
        await answer(asked, reply)

    with ScriptedServer(script) as server:
        words = [server.url, "--concurrency", "4", "--requests", "500", "--warmup", "0"]
        words += ["--output", str(path)]
        command = [sys.executable, "-m", "outpace", "benchmark", "serve", *words]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = program.communicate(timeout=60)
    assert program.returncode == 130 and err == b"outpace: interrupted\n"
    written = json.loads(path.read_text())
    (level,) = written["levels"]
    assert (
        written["interrupted"] and 20 <= level["completed"] < 40 and 1 <= level["unfinished"] <= 4
    )
    assert b"tokens per second" in out
