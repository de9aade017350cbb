"""How far loading has come."""

from __future__ import annotations

import pytest

from outpace.cli import flags
from outpace.models.load import load_model
from outpace.models.progress import TOLD, ignore, told


def test_loading_says_how_much_has_come() -> None:
    """Parameter by parameter, in bytes of the dtype that they get; only for as long as asked."""
    said: list[tuple[int, int]] = []
    with told(lambda done, total: said.append((done, total))):
        model = load_model("tiny-ar")
    parameters = list(model.parameters())
    assert len(said) == len(parameters) and said == sorted(said)
    assert {total for _, total in said} == {sum(p.nbytes for p in parameters)} == {said[-1][0]}
    assert TOLD.get() is ignore
    load_model("tiny-ar")
    assert len(said) == len(parameters)


def test_who_shows_it_may_end_it() -> None:
    """As Ctrl-C does; nobody is told any longer."""

    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), told(end):
        load_model("tiny-ar")
    assert TOLD.get() is ignore


def test_the_terminal_shows_it_for_large_models() -> None:
    """In GiB; a small one is there at once."""
    said: list[str] = []
    flags.loaded(said.append, 2**26, 2**27)
    flags.loaded(said.append, 2**30, 15 * 2**30)
    assert said == ["1.0 of 15.0 GiB"]
