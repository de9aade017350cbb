"""Tests of the client against a scripted server with known times."""

import asyncio
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.lab.client import Client, EventReader, RequestError, record_text
from outpace.lab.load_figures import RequestRecord, compute_figures
from scripted import Clock, ScriptedServer

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


def ask(server, body=CHAT, **options):
    async def run():
        async with Client(server.url, **options) as client:
            return await client.send_request(body)

    return asyncio.run(run())


@pytest.fixture
def clock(monkeypatch):
    """The client's clock, controlled by the script."""
    made = Clock()
    monkeypatch.setattr(sys.modules[Client.__module__], "clock", made)
    return made


def test_times_are_those_of_the_script(clock):
    async def script(asked, reply):
        reply.start()
        await clock.wait(0.2)
        reply.text("It ")
        await clock.wait(0.3)
        reply.text("is", " ", "a")
        await clock.wait(0.1)
        reply.text(" 7.")
        await clock.wait(0.15)
        reply.finish(11, forwards=3)

    with ScriptedServer(script) as server:
        found = ask(server)
    assert found.error is None and found.text == "It is a 7." and found.finish_reason == "stop"
    assert (found.tokens, found.forwards) == (11, 3)
    assert found.began == 100 and found.ttft == pytest.approx(0.2)
    assert found.gaps == pytest.approx([0.3, 0.1])  # three chunks in one write are one event
    assert found.e2e == pytest.approx(0.75)
    assert found.tpot == pytest.approx(0.055)


def test_what_is_no_committed_text_is_no_event(clock):
    async def script(asked, reply):
        reply.start()
        await clock.wait(0.1)
        reply.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await clock.wait(0.1)
        reply.event({"choices": [], "outpace": {"index": 0, "canvas": ["a", None]}})
        await clock.wait(0.1)
        reply.raw(b": ping\n\n")
        await clock.wait(0.2)
        reply.text("a")
        reply.finish(1)

    with ScriptedServer(script) as server:
        found = ask(server)
    assert len(found.events) == 1 and found.ttft == pytest.approx(0.5) and found.text == "a"


async def refused(asked, reply):
    reply.refuse(429, "too\nmany")


async def dropped(asked, reply):
    reply.start()
    reply.text("half")
    await asyncio.sleep(0.1)
    reply.drop()


async def dropped_before(asked, reply):
    reply.drop()


async def unfinished(asked, reply):
    reply.start()
    reply.text("half")


async def failed(asked, reply):
    reply.start()
    reply.text("half")
    reply.event({"error": {"message": "the method failed"}})


async def hung(asked, reply):
    reply.start()
    reply.text("half")
    await asyncio.sleep(0.6)


async def no_stream(asked, reply):
    reply.whole({"choices": [{"message": {"content": "x"}}]})


async def no_json(asked, reply):
    reply.start()
    reply.raw(b"data: {half\n\n")


async def no_chunk(asked, reply):
    reply.start()
    reply.event({"object": "thing"})


async def no_http(asked, reply):
    reply.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    reply.ended = True


@pytest.mark.parametrize(
    ("script", "kind", "text", "message"),
    [
        (refused, "429", "", "too many"),
        (dropped, "dropped", "half", ""),
        (dropped_before, "dropped", "", ""),
        (unfinished, "dropped", "half", "without [DONE]"),
        (failed, "failed", "half", "the method failed"),
        (hung, "timeout", "half", ""),
        (no_stream, "malformed", "", "application/json instead of an event stream"),
        (no_json, "malformed", "", "{half"),
        (no_chunk, "malformed", "", "thing"),
        (no_http, "malformed", "", ""),
    ],
)
def test_errors_have_their_kind_and_keep_what_came(script, kind, text, message):
    with ScriptedServer(script) as server:
        found = ask(server, timeout=0.3)
    assert (found.error, found.text) == (kind, text) and message in found.error_message
    assert found.ended >= found.began


def test_a_request_that_is_cancelled_closes_its_connection():
    gone = []

    async def script(asked, reply):
        reply.start()
        reply.text("a")
        while not reply.writer.transport.is_closing():
            reply.raw(b": more\n\n")
            await asyncio.sleep(0.01)
        gone.append(True)

    async def run(server):
        async with Client(server.url) as client:
            task = asyncio.create_task(client.send_request(CHAT))
            while not server.asked:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
            while not gone:
                await asyncio.sleep(0.01)

    with ScriptedServer(script) as server:
        asyncio.run(run(server))


def test_the_key_is_sent_and_a_redirect_is_not_followed():
    async def script(asked, reply):
        reply.writer.write(b"HTTP/1.1 302 No\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")
        reply.ended = True

    with ScriptedServer(script) as server:
        found = ask(server, key="secret")
        assert [asked.headers["authorization"] for asked in server.asked] == ["bearer secret"]
    assert found.error == "302"


URLS = ["", "localhost:8000", "ftp://x", "http://", "http://x:port", "http://x:99999"]
URLS += ["http://x:0", "http://user:word@x", "http://x?key=1", "http://[::1", "/etc/passwd"]


WORDS = ["choices", "delta", "message", "content", "text", "usage", "completion_tokens"]
WORDS += ["outpace", "forwards", "error", "finish_reason", "reasoning"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=12,
)


@given(st.lists(VALUES.map(json.dumps) | st.text(), max_size=5))
def test_whatever_a_server_says_is_figures_or_a_fault(chunks):
    exchange = RequestRecord(began=0.0, ended=9.0)
    try:
        for now, chunk in enumerate(chunks):
            record_text(exchange, chunk.encode(errors="replace"), float(now))
    except RequestError as fault:
        exchange.error = fault.kind
    assert exchange.error in (None, "failed", "malformed")
    assert json.dumps(compute_figures([exchange], 9.0, {"ttft": 1.0}), allow_nan=False)


STREAM = (
    b': ping\r\n\r\ndata: {"a": "\xc3\xa9"}\n\nevent: x\ndata:b\r\n\r\nid: 3\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": "\xc3\xa9"}', b"b", b"[DONE]"]


@given(st.sets(st.integers(0, len(STREAM))))
def test_cut_anywhere(cuts):
    ends = sorted({0, *cuts, len(STREAM)})
    reader, found = EventReader(), []
    for begin, end in zip(ends, ends[1:], strict=False):
        found += reader.read_chunk(STREAM[begin:end])
    assert found == EVENTS and reader.incomplete_line == b""
