"""Old names of public attributes still work, and warn where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from helpers import request_of
from outpace.decoding import Canvas, Decoding, Kind, Request, Target
from outpace.methods.method import Method
from outpace.training.objective import Objective


def warned(old: str, new: str) -> Any:
    """A context that expects the warning, attributed to this file."""
    return pytest.warns(FutureWarning, match=rf"\.{old} is now \w+\.{new};")


def test_attributes_and_methods_work_under_old_names() -> None:
    request = request_of(prompt=[1, 2], max_tokens=4)
    with warned("given", "fixed_tokens") as caught:
        assert request.given == request.fixed_tokens  # type: ignore[attr-defined]
    assert caught[0].filename == __file__
    with warned("of", "from_request"):
        canvas = Canvas.of(request)  # type: ignore[attr-defined]
    assert isinstance(canvas, Canvas)
    with warned("extend", "append_slots"):
        canvas.extend(3)  # type: ignore[attr-defined]
    assert len(canvas.ids) == 5
    with warned("blocked", "is_block_causal"):
        assert Target(is_block_causal=True).blocked  # type: ignore[attr-defined]


def test_overrides_work_under_old_names() -> None:
    with warned("decodes", "target_kinds"):

        class Older(Method):
            decodes: ClassVar[tuple[Kind, ...]] = (Kind.CAUSAL,)

            def decode(self, request: Request) -> Decoding:
                raise NotImplementedError

    assert Older.target_kinds == (Kind.CAUSAL,)
    with warned("slots", "slots_needed"):

        class Longer(Older):
            def slots(self, prompt: int, max_tokens: int) -> int:
                return 7

    assert Longer().slots_needed(1, 2) == 7
    with warned("even", "has_fixed_forwards"):

        class Even(Objective):
            @property
            def even(self) -> bool:
                return True

    assert Even().has_fixed_forwards


@pytest.mark.filterwarnings("error")
def test_an_option_of_an_old_name_is_no_override() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Checking(Method):
        check: bool = True

        def decode(self, request: Request) -> Decoding:
            raise NotImplementedError

    assert Checking(check=False).check is False
    Checking().check_request(request_of(prompt=[1], max_tokens=2))
