"""Messages between server and engine process."""

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from looped import submit
from outpace import LLM
from outpace.api.engine_client import (
    CancelCommand,
    ConnectionEndedError,
    InspectCommand,
    LoadError,
    QueueFullError,
)
from outpace.api.output import Event
from outpace.constraint.pattern import TooLargeError
from outpace.engine.job import DecodingError
from outpace.server.engine_process import (
    HEARTBEAT_SECONDS,
    EngineConnection,
    EngineProcess,
    FrameDecoder,
    LoadCommand,
    decode_message,
    encode_frame,
    receive_object,
    send_object,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_commands_arrive_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    connection = EngineConnection(theirs)
    commands = [submit(1, seed=3, regex="a+"), CancelCommand(1, "x"), InspectCommand()]
    data = b"".join(map(encode_frame, commands))
    ours.sendall(data)
    assert connection.receive_commands(1) == commands
    for place in range(len(data)):
        ours.sendall(data[place : place + 1])
        found = connection.receive_commands(1)
        assert found == [] or place == len(data) - 1 or found[0] in commands
    assert found == commands[-1:]


def test_heartbeats_are_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    connection = EngineConnection(theirs)
    began = time.monotonic()
    for _ in range(3):
        assert connection.receive_commands(None) == []
    assert time.monotonic() - began >= 2 * HEARTBEAT_SECONDS
    assert receive_object(ours) == receive_object(ours) == [1.0]


def test_heartbeats_of_a_pass(pair: tuple[socket.socket, socket.socket]) -> None:
    """Each change of the size, which the time limit follows, and few others, cross the border."""
    ours, theirs = pair
    send_object(theirs, {})
    handle: Any = SimpleNamespace(process=None, socket=ours)
    client = EngineProcess(LoadCommand(models={}, small=True), handle)
    receive_object(theirs)
    connection = EngineConnection(theirs)
    for size in (1.0, 3.5, 3.5, 3.5, 1.0):
        connection.report_layer(size)
    frames = [receive_object(ours) for _ in range(3)]
    assert frames == [[1.0], [3.5], [1.0]]
    for frame in frames[:2]:
        client.silent_seconds = 9.0
        client.data_received(encode_frame(frame))
    assert (client.layer_size, client.heartbeat) == (3.5, 0.0)


def test_closed_connection_raises(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    connection = EngineConnection(theirs)
    connection.sent = time.monotonic()
    ours.close()
    with pytest.raises(ConnectionEndedError):
        connection.receive_commands(1)
    with pytest.raises(ConnectionEndedError):
        send_object(theirs, [])
    with pytest.raises(ConnectionEndedError):
        receive_object(theirs)


def test_events_arrive_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    (output,) = LLM("tiny-aux").generate([[5, 6, 7]], max_tokens=4)
    event = Event(number=3, text=output.text, steps=output.steps, output=output)
    messages = [event, Event(number=4), {"x": (2, [])}]
    EngineConnection(theirs).send_messages(messages, None)
    (received,) = FrameDecoder().feed(ours.recv(2**20))
    assert [*map(decode_message, received)] == messages


@pytest.mark.parametrize(
    "kind", [ValueError, TooLargeError, QueueFullError, LoadError, DecodingError]
)
def test_errors_keep_their_type(
    pair: tuple[socket.socket, socket.socket], kind: type[Exception]
) -> None:
    ours, theirs = pair

    class Own(Exception):
        """One that no pickle could bring."""

    error = kind("no")
    error.__cause__ = TooLargeError("much")
    EngineConnection(theirs).send_messages(
        [Event(number=1, error=error), Event(number=2, error=Own("x"))], None
    )
    known, other = map(decode_message, receive_object(ours))
    assert isinstance(known, Event) and isinstance(other, Event)
    assert type(known.error) is kind and str(known.error) == "no"
    assert isinstance(known.error.__cause__, TooLargeError) and str(known.error.__cause__) == "much"
    assert type(other.error) is RuntimeError and str(other.error) == "Own('x')"
    assert other.error.__cause__ is None and "Own" in "".join(other.error.__notes__)
