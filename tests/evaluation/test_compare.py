"""Comparison of reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.evaluation.compare import (
    accuracy_under_parallelism,
    bootstrap_differences,
    pareto_indices,
    read_results,
)


def result(right: list[bool], tokens: list[int], **changes: Any) -> dict[str, Any]:
    """A result with ten forwards per answer."""
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
    """Write a report."""
    path.write_text(json.dumps({"provenance": {}, "results": results}))
    return path


def test_equal_runs_do_not_differ() -> None:
    run = result([True, False] * 20, [30] * 40)
    for each in bootstrap_differences(run, run).values():
        assert (each.value, each.low, each.high, each.p) == (0, 0, 0, 1)


def test_paired_test_is_more_sensitive() -> None:
    first = [True] * 60 + [False] * 40
    other = [True] * 66 + [False] * 34
    found = bootstrap_differences(result(first, [30] * 100), result(other, [40] * 100))
    assert found["accuracy"].value == pytest.approx(0.06) and found["accuracy"].low > 0
    assert found["accuracy"].p < 0.05
    assert found["tokens_per_forward"].value == pytest.approx(1.0)


def test_false_positive_rate() -> None:
    rng = np.random.default_rng(1)
    found = [
        bootstrap_differences(
            result((rng.random(60) < 0.5).tolist(), [30] * 60),
            result((rng.random(60) < 0.5).tolist(), [30] * 60),
        )["accuracy"]
        for _ in range(60)
    ]
    assert sum(each.low > 0 or each.high < 0 for each in found) <= 9


def test_different_questions_are_an_error() -> None:
    first = result([True], [3])
    for other in (result([True], [3], questions="r"), result([True] * 2, [3] * 2, file="b.json")):
        with pytest.raises(ValueError, match="a.json and .* answer different questions"):
            bootstrap_differences(first, other)


def test_unjudged_results_have_no_accuracy() -> None:
    run = result([True], [3], accuracy=None)
    assert set(bootstrap_differences(run, run)) == {"tokens_per_forward"}
    assert accuracy_under_parallelism([run]) == {}


def test_fronts_compare_the_same_questions() -> None:
    slow = result([True, True], [10, 10])
    fast = result([True, False], [30, 30], method="X(a=2)")
    worse = result([True, False], [20, 20])
    other = result([False], [1], questions="r")
    assert pareto_indices([slow, fast, worse, other]) == {0, 1, 3}
    assert accuracy_under_parallelism([slow, fast]) == {"story: m X": pytest.approx(100)}


@pytest.mark.parametrize(
    ("held", "expected_message"),
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
def test_other_schemas_are_rejected(tmp_path: Path, held: str, expected_message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(held)
    with pytest.raises(ValueError, match=expected_message):
        read_results([path])


def test_results_have_their_file(tmp_path: Path) -> None:
    path = write(tmp_path / "b.json", result([True], [3]))
    assert [each["file"] for each in read_results([path, path])] == ["b.json"] * 2


@pytest.mark.parametrize(
    ("name", "value", "expected_message"),
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
def test_invalid_figures_are_named(
    tmp_path: Path, name: str, value: Any, expected_message: str
) -> None:
    path = write(tmp_path / "a.json", {**result([True], [3]), name: value})
    with pytest.raises(ValueError, match=re.escape(expected_message)):
        read_results([path])
