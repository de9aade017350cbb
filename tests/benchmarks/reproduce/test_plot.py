"""Pictures of figures beside the published points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reproduce.figure import find
from reproduce.plot import axes_of, draw_figure

RESULT: dict[str, Any] = {
    "line": "tiny-ar autoregressive",
    "setting": "",
    "batch": 1,
    "clock": "cpu",
    "tokens_per_cpu_second": 500.0,
    "accuracy": 0.99,
    "interval": [0.9, 1.0],
    "acceptance_length": 1.0,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("apd:figure2", ("tokens_per_second", "accuracy")),
        ("apd:table2", ("tokens_per_second", "accuracy")),
        ("wedlm:pareto", ("speedup", "accuracy")),
        ("dflash:table1", ("speedup", "acceptance_length")),
    ],
)
def test_published_points_have_the_axes_that_they_can(
    name: str, axes: tuple[str, str], tmp_path: Path
) -> None:
    (figure,) = find(name)
    points = [dict(point) for point in figure.published()]
    assert axes_of(points) == axes
    draw_figure([RESULT], points, name, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
