"""Tests of the bounds of numbers in recipes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from outpace.training.field_types import Bounds, field_hints
from outpace.training.objectives import OBJECTIVES
from outpace.training.recipe import SECTIONS, load_recipe

KINDS = {**SECTIONS, **OBJECTIVES}

RECIPE = """
[model]
init = "tiny-aux"
[objective]
name = "sft"
[data]
path = "story:train"
"""

NEEDED = {"held_out": "story:test", "data": "story:train"}
"""What a section needs besides: its path."""


def numbers(hint: Any, length: int = 0) -> Iterator[tuple[Any, int]]:
    """The numbers of an annotation: bounds or a bare type, and how many of them are in a list."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        yield parts[1], length
    elif hint in (int, float):
        yield hint, length
    elif get_origin(hint) is tuple:
        yield from numbers(parts[0], 1 if parts[-1] is Ellipsis else len(parts))
    elif get_origin(hint) is not Literal:
        for part in parts:
            yield from numbers(part)


NUMBERS = [
    (section, name, bounds, length)
    for section, kind in KINDS.items()
    for name, hint in field_hints(kind).items()
    for bounds, length in numbers(hint)
]


def outside(bounds: Bounds) -> list[float]:
    """Numbers out of bounds, slightly and by far."""
    low = bounds.low if bounds.above else bounds.low - 1
    high = bounds.high if bounds.below else bounds.high + 1
    return [low, high, -(10**30), 10**23, 1e30, math.nan, math.inf, -math.inf]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with required keys only."""
    path = tmp_path_factory.mktemp("recipes") / "mine.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.sampled
@pytest.mark.parametrize(("section", "name", "bounds", "length"), NUMBERS, ids=str)
def test_every_number_has_bounds_that_hold(
    recipe: Path, section: str, name: str, bounds: Any, length: int
) -> None:
    assert isinstance(bounds, Bounds), f"{section}.{name} has none"
    kind, where = KINDS[section], section if section in SECTIONS else "objective"
    path = NEEDED.get(section)
    others = [f"objective.name={section}"] if where == "objective" else []
    others += [f"{section}.path={path}"] if path else []
    for number in outside(bounds):
        written = [number] * length if length else number
        with pytest.raises(ValueError, match=rf"^\[{where}\]: {name} must be .*number"):
            load_recipe(recipe, [*others, f"{where}.{name}={written}"])
        made = (number,) * length if length else number
        with pytest.raises(ValueError, match=f"^{name} must be .*number"):
            kind(**{name: made}, **({"path": path} if path else {}))
