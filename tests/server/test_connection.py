"""Messages between server and engine process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from outpace import LLM
from outpace.api.engine_loop import Cancel, ConnectionEnded, Inspect, Progress, QueueFull, Submit
from outpace.constraint.pattern import TooLarge
from outpace.engine.job import DecodingError
from outpace.server.connection import PULSE, EngineConnection, Inbox, decoded, get, packed, put


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_commands_arrive_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Byte by byte, or together."""
    ours, theirs = pair
    connection = EngineConnection(theirs)
    commands = [Submit(1, "x", [1, 2], True, False, {"seed": 3}), Cancel(1, "x"), Inspect()]
    data = b"".join(map(packed, commands))
    ours.sendall(data)
    assert connection.receive(1) == commands
    for place in range(len(data)):
        ours.sendall(data[place : place + 1])
        found = connection.receive(1)
        assert found == [] or place == len(data) - 1 or found[0] in commands
    assert found == commands[-1:]


def test_heartbeats_are_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    """An empty message after each idle interval."""
    ours, theirs = pair
    connection = EngineConnection(theirs)
    began = time.monotonic()
    for _ in range(3):
        assert connection.receive(None) == []
    assert time.monotonic() - began >= 2 * PULSE
    assert get(ours) == get(ours) == []


def test_closed_connection_raises(pair: tuple[socket.socket, socket.socket]) -> None:
    """For receiving and for sending."""
    ours, theirs = pair
    connection = EngineConnection(theirs)
    connection.sent = time.monotonic()
    ours.close()
    with pytest.raises(ConnectionEnded):
        connection.receive(1)
    with pytest.raises(ConnectionEnded):
        put(theirs, [])
    with pytest.raises(ConnectionEnded):
        get(theirs)


def test_progress_round_trip(pair: tuple[socket.socket, socket.socket]) -> None:
    """Progress with its steps, and engine statistics."""
    ours, theirs = pair
    (output,) = LLM("tiny-aux").generate([[5, 6, 7]], max_tokens=4)
    progress = Progress(3, steps=output.steps)
    usage = {"x": (2, [])}
    EngineConnection(theirs).report([progress, Progress(4), usage], None)
    ((first, second, third),) = Inbox().take(ours.recv(2**20))
    assert [decoded(each) for each in (first, second, third)] == [
        progress,
        Progress(4, None, []),
        usage,
    ]


@pytest.mark.parametrize("kind", [ValueError, TooLarge, QueueFull, DecodingError])
def test_errors_keep_their_type(
    pair: tuple[socket.socket, socket.socket], kind: type[Exception]
) -> None:
    """Client errors keep type and cause; others become `RuntimeError`."""
    ours, theirs = pair

    class Own(Exception):
        """One that no pickle could bring."""

    error = kind("no")
    error.__cause__ = TooLarge("much")
    EngineConnection(theirs).report([Progress(1, error=error), Progress(2, error=Own("x"))], None)
    known, other = map(decoded, get(ours))
    assert isinstance(known, Progress) and isinstance(other, Progress)
    assert type(known.error) is kind and str(known.error) == "no"
    assert isinstance(known.error.__cause__, TooLarge) and str(known.error.__cause__) == "much"
    assert type(other.error) is RuntimeError and str(other.error) == "Own('x')"
    assert other.error.__cause__ is None and "Own" in "".join(other.error.__notes__)
