"""Tests of signals between steps: the first is recorded, the second ends the run."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outpace.training import trainer
from outpace.training.trainer import DEFAULT_HANDLERS, catch_signals, exit_exception

SIGNALS = (signal.SIGINT, signal.SIGTERM)

each = pytest.mark.parametrize("number", SIGNALS)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Python's own handlers, whatever a launcher of processes has left in another test."""
    before = [signal.signal(number, DEFAULT_HANDLERS[number]) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def handlers() -> list[object]:
    """The handler of each signal."""
    return [signal.getsignal(number) for number in SIGNALS]


@each
def test_the_first_is_noted_and_the_second_ends(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    before = handlers()
    with catch_signals(printed.append) as signalled:
        assert signalled() == 0
        signal.raise_signal(number)
        for other in SIGNALS:
            signal.raise_signal(other)
        assert signalled() == number and len(printed) == 1
        monkeypatch.setattr(trainer, "SAME_SIGNAL_SECONDS", 0.0)
        with pytest.raises(type(exit_exception(number))) as raised:
            signal.raise_signal(number)
    assert handlers() == before
    assert number == signal.SIGINT or raised.value.code == 128 + number


@each
def test_who_ignores_a_signal_still_does(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with catch_signals() as signalled:
        signal.raise_signal(number)
        assert not signalled()
    assert signal.getsignal(number) is signal.SIG_IGN
    signal.signal(number, DEFAULT_HANDLERS[number])

    def elsewhere() -> int:
        with catch_signals() as signalled:
            return signalled()

    before = handlers()
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(elsewhere).result()
    assert handlers() == before
