"""How the sides of a comparison are timed and set against each other."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from harness import Bar, Timing, alternate, costs, finish
from official import Decode, compare

OURS = [Timing(1.0, 2.0), Timing(2.0, 2.0), Timing(9.0, 2.0)]
THEIRS = [Timing(2.0, 1.0), Timing(2.0, 1.0), Timing(3.0, 1.0)]


def test_costs_are_per_unit_and_ratios_those_of_the_rounds() -> None:
    rows = costs({"theirs": THEIRS, "ours": OURS}, {"theirs": 10, "ours": 5}, "forward")
    assert rows["theirs"]["CPU ratio"] == rows["theirs"]["wall ratio"] == 1
    assert rows["ours"] == {
        "forwards": 5,
        "CPU ms per forward": pytest.approx(400),
        "wall ms per forward": pytest.approx(400),
        "CPU ratio": pytest.approx(2),
        "wall ratio": pytest.approx(4),
        "CPU ratio of decodes": pytest.approx(1),
        "range of decodes": "0.50-3.00",
    }


def test_sides_take_turns_in_alternating_order() -> None:
    order: list[str] = []
    sides = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = alternate(sides, 6)
    assert "".join(order) == "abc" + "abccba" + "bcaacb" + "cabbac"
    assert [len(runs) for runs in timings.values()] == [6, 6, 6]


@pytest.mark.parametrize(("at_least", "met"), [(True, [True, False]), (False, [False, True])])
def test_bars_are_met_on_their_side(at_least: bool, met: list[bool], tmp_path: Path) -> None:
    bars = [Bar(what="x", value=v, limit=2.0, at_least=at_least) for v in (3.0, 1.0)]
    path = tmp_path / "new" / "a.json"
    finish(Namespace(json=path), {"rows": []}, bars)
    assert [bar["met"] for bar in json.loads(path.read_text())["bars"]] == met


@pytest.mark.nightly
def test_what_sides_share_is_checked_before_they_are_timed() -> None:
    called: list[str] = []

    def side(name: str, passes: int) -> Decode:
        return lambda ids: (called.append(name) or ids * passes, passes)

    decodes = {"official": side("official", 6), "ours": side("ours", 3)}
    given: Any = ({"block": 4}, decodes, [[1], [2]], 2, "step")
    rows = compare(*given, columns=lambda result, timings: {"tokens": len(result[0][0])})
    assert [list(row)[:4] for row in rows] == [["block", "side", "tokens", "steps"]] * 2
    assert [(row["side"], row["tokens"], row["steps"]) for row in rows] == [
        ("official", 6, 12),
        ("ours", 3, 6),
    ]
    called.clear()
    with pytest.raises(AssertionError, match="ours"):
        compare(*given, same=["ours"])
    assert called == ["official", "official", "ours", "ours"]
    assert len(compare(*given, same=["ours"], shared=lambda result: len(result[0]))) == 2
