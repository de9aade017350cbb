"""Ctrl-C between steps: once it is noted, twice it interrupts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outpace.training import interrupt
from outpace.training.interrupt import held


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Python's own handler, whatever a launcher of processes has left in another test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def test_the_first_is_noted_and_the_second_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless both come together, as those of a terminal and of a launcher do."""
    said: list[str] = []
    with held(said.append) as pressed:
        assert not pressed()
        press()
        press()
        assert pressed() and len(said) == 1
        monkeypatch.setattr(interrupt, "AGAIN", 0.0)
        with pytest.raises(KeyboardInterrupt):
            press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_who_ignores_interrupts_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind `nohup`; and a thread cannot take them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held() as pressed:
            press()
            assert not pressed()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def elsewhere() -> bool:
        with held() as pressed:
            return pressed()

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(elsewhere).result()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
