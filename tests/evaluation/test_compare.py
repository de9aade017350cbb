"""Reports beside one another."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.evaluation.compare import areas, differences, fronts, read_results


def result(right: list[bool], tokens: list[int], **changes: Any) -> dict[str, Any]:
    """A result with answers of ten forwards each."""
    return {
        "schema": 1,
        "task": "story",
        "questions": "q",
        "model": "m",
        "method": "X(a=1)",
        "problems": len(right),
        "batch": 1,
        "accuracy": sum(right) / len(right),
        "interval": [0.0, 1.0],
        "tokens_per_forward": sum(tokens) / (10 * len(tokens)),
        "tokens_per_forward_error": None,
        "tokens_per_second": 1.0,
        "latency": {"p50": 0.1, "p95": 0.2},
        "first_text": {"p50": 0.1, "p95": 0.2},
        "acceptance_length": 1.0,
        "p_cache": None,
        "samples": {"right": right, "tokens": tokens, "forwards": [10] * len(right)},
        "file": "a.json",
        **changes,
    }


def write(path: Path, *results: Any) -> Path:
    """A report."""
    path.write_text(json.dumps({"provenance": {}, "results": results}))
    return path


def test_equal_runs_do_not_differ() -> None:
    """And a p-value says so."""
    run = result([True, False] * 20, [30] * 40)
    for each in differences(run, run).values():
        assert (each.value, each.low, each.high, each.p) == (0, 0, 0, 1)


def test_pairs_see_what_averages_hide() -> None:
    """Five of a hundred are better and none is worse: by pairs that is no chance."""
    first = [True] * 60 + [False] * 40
    other = [True] * 66 + [False] * 34
    found = differences(result(first, [30] * 100), result(other, [40] * 100))
    assert found["accuracy"].value == pytest.approx(0.06) and found["accuracy"].low > 0
    assert found["accuracy"].p < 0.05
    assert found["tokens_per_forward"].value == pytest.approx(1.0)


def test_chance_is_called_chance_as_often_as_it_says() -> None:
    """Runs of one law differ significantly in about one case of twenty."""
    rng = np.random.default_rng(1)
    found = [
        differences(
            result((rng.random(60) < 0.5).tolist(), [30] * 60),
            result((rng.random(60) < 0.5).tolist(), [30] * 60),
        )["accuracy"]
        for _ in range(60)
    ]
    assert sum(each.low > 0 or each.high < 0 for each in found) <= 9


def test_other_questions_cannot_be_paired() -> None:
    """Both files are named."""
    first = result([True], [3])
    for other in (result([True], [3], questions="r"), result([True] * 2, [3] * 2, file="b.json")):
        with pytest.raises(ValueError, match="a.json and .* answer different questions"):
            differences(first, other)


def test_what_nobody_judged_has_no_accuracy_to_compare() -> None:
    """Nor an area under it."""
    run = result([True], [3], accuracy=None)
    assert set(differences(run, run)) == {"tokens_per_forward"}
    assert areas([run]) == {}


def test_fronts_and_areas_are_of_the_same_questions() -> None:
    """A run that answers others competes with nobody."""
    slow = result([True, True], [10, 10])
    fast = result([True, False], [30, 30], method="X(a=2)")
    worse = result([True, False], [20, 20])
    other = result([False], [1], questions="r")
    assert fronts([slow, fast, worse, other]) == {0, 1, 3}
    assert areas([slow, fast]) == {"story: m X": pytest.approx(100)}


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("", "is not a report"),
        ("[]", "is not a report"),
        ('{"results": 5}', "is not a report"),
        ('{"results": [{}]}', "has schema None, but this version reads schema 1"),
        ('{"results": [{"schema": 7}]}', "has schema 7, but this version reads schema 1"),
        ('{"results": [{"schema": 1, "task": "story"}]}', "a.json has a result without questions"),
        ("[" * 100_000, "is not a report"),
    ],
)
def test_reports_of_another_schema_are_refused(tmp_path: Path, held: str, says: str) -> None:
    """With both versions."""
    path = tmp_path / "a.json"
    path.write_text(held)
    with pytest.raises(ValueError, match=says):
        read_results([path])


def test_results_know_their_file(tmp_path: Path) -> None:
    """To be named in messages."""
    path = write(tmp_path / "b.json", result([True], [3]))
    assert [each["file"] for each in read_results([path, path])] == ["b.json"] * 2


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("task", 5, "has task 5, which must be a text"),
        ("questions", [], "has questions [], which must be a text"),
        ("problems", 0, "has problems 0, which must be a whole number above 0"),
        ("problems", 2, "has samples that are not right, tokens, forwards of 2 answers each"),
        ("accuracy", 1.5, "has accuracy 1.5, which must be a number from 0 to 1, or null"),
        ("accuracy", "x", "has accuracy 'x'"),
        ("interval", [0.5], "has interval [0.5], which must be two numbers"),
        ("tokens_per_forward", float("nan"), "has tokens_per_forward nan, which must be a number"),
        ("tokens_per_second", True, "has tokens_per_second True, which must be a number"),
        ("latency", {"p50": 1}, "has latency {'p50': 1}, which must be seconds as p50 and p95"),
        ("samples", {"right": [1], "tokens": [3], "forwards": [10]}, "has samples that are not"),
        ("line", 5, "has line 5, which must be a text"),
    ],
)
def test_a_figure_that_is_none_is_named(tmp_path: Path, name: str, value: Any, says: str) -> None:
    """With its value and what it must be."""
    path = write(tmp_path / "a.json", {**result([True], [3]), name: value})
    with pytest.raises(ValueError, match=re.escape(says)):
        read_results([path])
