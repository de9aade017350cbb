"""Comparison of reports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.lab.compare import bootstrap_differences, pareto_indices, read_results


def result(right: list[bool], tokens: list[int], **changes: Any) -> dict[str, Any]:
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


def test_likelihoods_are_paired_and_replace_the_accuracy_of_a_front() -> None:
    def judged(sums: list[float]) -> dict[str, Any]:
        run = result([True, True], [30, 30], likelihood=sum(sums) / 20)
        run["samples"] |= {"likelihood": sums, "judged": [10, 10]}
        return run

    better, worse = judged([-5.0, -15.0]), judged([-8.0, -18.0])
    found = bootstrap_differences(worse, better)["likelihood"]
    assert found.value == pytest.approx(0.3) and found.low == found.high == pytest.approx(0.3)
    assert pareto_indices([worse, better]) == {1}


def test_false_positive_rate() -> None:
    rng = np.random.default_rng(1)
    runs = [result((rng.random(60) < 0.5).tolist(), [30] * 60) for _ in range(80)]
    pairs = zip(runs[::2], runs[1::2], strict=True)
    found = [bootstrap_differences(*pair)["accuracy"] for pair in pairs]
    # At a level of 5 %, two of 40 are expected; more than seven have a probability of 0.1 %.
    assert sum(each.low > 0 or each.high < 0 for each in found) <= 7


def test_different_questions_are_an_error() -> None:
    first = result([True], [3])
    for other in (result([True], [3], questions="r"), result([True] * 2, [3] * 2, file="b.json")):
        with pytest.raises(ValueError, match="a.json"):
            bootstrap_differences(first, other)


def test_fronts_compare_the_same_questions() -> None:
    slow = result([True, True], [10, 10])
    fast = result([True, False], [30, 30], method="X(a=2)")
    worse = result([True, False], [20, 20])
    other = result([False], [1], questions="r")
    assert pareto_indices([slow, fast, worse, other]) == {0, 1, 3}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"results": 5}',
        '{"results": [{}]}',
        '{"results": [{"schema": 7}]}',
        '{"results": [{"schema": 1, "task": "story"}]}',
        "[" * 100_000,
    ],
    ids=range(7),
)
def test_other_files_are_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="a.json"):
        read_results([path])
