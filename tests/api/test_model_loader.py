"""Models that an engine loop loads when they are requested, and unloads when they are idle."""

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any
from weakref import ref

import pytest
import torch

from looped import PROMPT, Script, submit, until_over
from outpace import LLM
from outpace.api import engine_loop
from outpace.api.engine_client import ConnectionEndedError, EngineCommand, InspectCommand, LoadError
from outpace.api.engine_loop import EngineLoop, LazyModel

Rounds = Iterator[list[EngineCommand]]
GIB = 2**30


def load() -> LLM:
    return LLM("tiny-aux", "autoregressive", cache_gib=0.01)


@pytest.fixture(scope="module")
def usual() -> list[int]:
    """Tokens that the small model answers."""
    (output,) = load().generate([PROMPT], max_tokens=24)
    return list(output.ids)


def lazy(load: Callable[[], LLM] = load, keep: float = 3600.0, weights: int = 0) -> LazyModel:
    return LazyModel(
        load=load,
        keep_seconds=keep,
        device=torch.device("cpu"),
        weight_bytes=weights,
        cache_bytes=0,
    )


def played(
    play: Callable[[Script, EngineLoop], Rounds], **models: LLM | LazyModel
) -> tuple[Script, EngineLoop]:
    script = Script(iter(()))
    loop = EngineLoop(script)
    for name, model in models.items():
        loop.add_model(name, model)
    script.rounds = play(script, loop)
    with pytest.raises(ConnectionEndedError):
        loop.run()
    loop.close()
    return script, loop


def until(condition: Callable[[], bool]) -> Rounds:
    """Yield rounds without commands until a condition holds."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        yield []


def error_of(script: Script, number: int) -> str:
    """Return the message of the load error that is all a request got."""
    (progress,) = script.of(number)
    assert isinstance(progress.error, LoadError)
    return str(progress.error)


def test_a_model_is_loaded_once_while_others_decode(usual: list[int]) -> None:
    gate, loads = Event(), list[int]()

    def load_late() -> LLM:
        loads.append(1)
        assert gate.wait(60)
        return load()

    def play(script: Script, loop: EngineLoop) -> Rounds:
        yield [submit(1, "y"), submit(2, "x"), submit(3, "y"), InspectCommand()]
        yield from until_over(script, 2)
        assert not script.of(1) and not script.of(3) and not gate.is_set()
        gate.set()
        yield from until_over(script, 1, 3)
        yield [submit(4, "y"), InspectCommand()]
        yield from until_over(script, 4)

    script, _ = played(play, x=load(), y=lazy(load_late))
    assert [script.ids(number) for number in (1, 2, 3, 4)] == [usual] * 4
    assert loads == [1]
    before, after = [set(each) for each in script.messages if isinstance(each, dict)]
    assert before == {"x"} and after == {"x", "y"}


def test_an_idle_model_is_unloaded_and_loaded_again(usual: list[int]) -> None:
    found: list[ref[Any]] = []

    def load_noted() -> LLM:
        llm = load()
        (pairing,) = llm.pairings.values()
        parts = (llm, llm.engine, llm.target, llm.target.prefix_cache, llm.model, pairing.answers)
        found.extend(map(ref, parts))
        return llm

    def play(script: Script, loop: EngineLoop) -> Rounds:
        yield [submit(1, "y", regex="[a-z]{3}", streams=True), submit(2, "y")]
        yield from until_over(script, 1, 2)
        yield from until(lambda: not loop.models)
        yield []
        assert script.waits[-1] is None and [each() for each in found] == [None] * 6
        yield [submit(3, "y")]
        yield from until_over(script, 3)

    script, loop = played(play, y=lazy(load_noted, keep=0.05))
    assert script.ids(2) == script.ids(3) == usual
    assert len(found) == 12


def test_a_model_in_use_is_kept(usual: list[int]) -> None:
    def play(script: Script, loop: EngineLoop) -> Rounds:
        yield [submit(1, "y", max_tokens=60, ignore_eos=True), submit(2, "z", max_tokens=2)]
        yield from until_over(script, 1, 2)
        assert set(loop.models) == {"y", "z"}
        yield []
        yield []
        wait = script.waits[-1]
        assert wait is not None and 1000 < wait <= 2000

    played(play, y=lazy(keep=2000.0), z=lazy(keep=3000.0))


def test_a_failed_load_is_tried_again(usual: list[int], caplog: pytest.LogCaptureFixture) -> None:
    gate, faults = Event(), [ValueError("x: no tensor"), MemoryError(), OSError(5, "bad disk")]

    def load_badly() -> LLM:
        assert gate.wait(60)
        if faults:
            raise faults.pop(0)
        return load()

    def play(script: Script, loop: EngineLoop) -> Rounds:
        yield [submit(1, "y"), submit(2, "y")]
        gate.set()
        for number in (3, 4, 5):
            yield from until_over(script, number - 1)
            yield [submit(number, "y")]
        yield from until_over(script, 5)

    script, _ = played(play, y=lazy(load_badly))
    assert error_of(script, 1) == error_of(script, 2) == "y cannot be loaded: x: no tensor"
    assert error_of(script, 3) == "y cannot be loaded: MemoryError; see the log"
    assert error_of(script, 4) == "y cannot be loaded: bad disk; see the log"
    assert script.ids(5) == usual
    assert "y cannot be loaded: x: no tensor" in caplog.text and "OSError" in caplog.text


def limit_memory(monkeypatch: pytest.MonkeyPatch, loops: list[EngineLoop], total: int) -> None:
    """Let models of a GiB fill the memory as they are loaded."""

    def available(device: torch.device) -> int:
        return (total - len(loops[0].models)) * GIB

    monkeypatch.setattr(engine_loop, "available_bytes", available)


@pytest.mark.nightly
def test_the_model_idle_longest_makes_room(
    usual: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[EngineLoop] = []
    limit_memory(monkeypatch, loops, 4)

    def play(script: Script, loop: EngineLoop) -> Rounds:
        loops.append(loop)
        for number, name in enumerate("abca"):
            yield [submit(number, name, max_tokens=2)]
            yield from until_over(script, number)
        assert set(loop.models) == {"x", "a", "b", "c"}
        yield [submit(10, "d", max_tokens=2)]
        yield from until_over(script, 10)
        assert set(loop.models) == {"x", "a", "c", "d"}
        yield [submit(11, "c", max_tokens=60, ignore_eos=True), submit(12, "e")]
        yield from until_over(script, 11, 12)
        assert set(loop.models) == {"x", "c", "d", "e"}
        assert script.ids(12) == usual

    played(play, x=load(), **{name: lazy(weights=GIB) for name in "abcde"})


@pytest.mark.nightly
def test_a_load_waits_for_models_in_use(usual: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[EngineLoop] = []
    limit_memory(monkeypatch, loops, 1)

    def play(script: Script, loop: EngineLoop) -> Rounds:
        loops.append(loop)
        yield [submit(1, "a", max_tokens=100, ignore_eos=True)]
        yield from until(lambda: bool(script.of(1)))
        yield [submit(2, "b")]
        yield []
        yield [submit(3, "a"), submit(4, "b")]
        assert not script.over(1)
        yield from until_over(script, 1)
        assert not script.of(3)
        yield from until_over(script, 2, 4)
        assert not script.over(3)
        yield from until_over(script, 3)
        assert set(loop.models) == {"a"}

    script, _ = played(play, **{name: lazy(weights=GIB) for name in "ab"})
    assert script.ids(2) == script.ids(3) == script.ids(4) == usual


def test_weights_without_room_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> LLM:
        raise AssertionError("it was read")

    loops: list[EngineLoop] = []
    limit_memory(monkeypatch, loops, 2)

    def play(script: Script, loop: EngineLoop) -> Rounds:
        loops.append(loop)
        yield [submit(1, "y"), submit(2, "z")]
        yield from until_over(script, 1, 2)

    z = LazyModel(
        load=load,
        keep_seconds=60.0,
        device=torch.device("cpu"),
        weight_bytes=GIB,
        cache_bytes=9 * GIB,
    )
    script, loop = played(play, y=lazy(never, weights=5 * GIB // 2), z=z)
    message = "y cannot be loaded: its weights need 2.50 GiB of memory, and 2.00 GiB are available"
    assert error_of(script, 1) == message
    assert set(loop.models) == {"z"} and script.over(2)
