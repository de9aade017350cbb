"""Metrics from traces, compared with manual calculations."""

import math

import numpy as np
import pytest

from outpace import Output
from outpace.cli.draw import speed_over_plain
from outpace.decoding import Step
from outpace.lab import metrics

HOLES = (range(4, 6),)


def output(*steps: Step, tokens: int, prompt: int = 4) -> Output:
    return Output(
        text="",
        ids=[0] * tokens,
        finish_reason="stop",
        steps=list(steps),
        prompt_tokens=prompt,
        seconds=1.0,
    )


SPECULATIVE = output(
    Step("target", 0, 4, 4, 1, 0.5),
    Step("draft", 4, 3, 7, 0, 0.25),
    Step("target", 4, 4, 8, 3, 0.25),
    Step("draft", 7, 3, 10, 0, 0.25),
    Step("target", 7, 4, 11, 1, 0.25),
    tokens=5,
)
DIFFUSION = output(
    Step("target", 0, 6, 6, 0, 1.0, holes=HOLES),
    Step("verifier", 0, 6, 6, 2, 0.5),
    Step("target", 0, 8, 8, 0, 1.0, holes=HOLES),
    Step("verifier", 4, 4, 8, 1, 0.5),
    tokens=3,
)


def test_accepted_lengths() -> None:
    assert metrics.accepted_lengths(SPECULATIVE) == [3, 1]
    assert metrics.accepted_lengths(DIFFUSION) == [2, 1]
    assert metrics.accepted_lengths(output(tokens=0)) == []
    assert metrics.acceptance_length([SPECULATIVE, DIFFUSION]) == pytest.approx((2 + 1.5) / 2)


def test_histogram_and_positions() -> None:
    counts = metrics.acceptance_histogram([SPECULATIVE, DIFFUSION])
    assert counts == [0, 2, 1, 1]
    assert metrics.acceptance_by_position(counts) == [1.0, 0.5, 0.25]
    assert metrics.acceptance_by_position([]) == [] == metrics.acceptance_by_position([0])


def test_fed_rows() -> None:
    assert metrics.count_fed_rows(SPECULATIVE) == 8 and metrics.count_fed_rows(DIFFUSION) == 10
    assert metrics.count_fed_rows(SPECULATIVE, "draft") == 2
    assert metrics.token_row_ratio([SPECULATIVE, DIFFUSION]) == pytest.approx(8 / 18)
    assert metrics.token_row_ratio([]) is None
    assert metrics.count_wasted_rows([SPECULATIVE, DIFFUSION]) == 3 + 7
    assert list(metrics.model_roles([SPECULATIVE, DIFFUSION])) == ["target", "draft", "verifier"]


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (0, 0, 0.0, 1.0)],
)
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    assert metrics.wilson_interval(right, count) == pytest.approx((low, high), abs=1e-4)


def test_ratio_error_equals_spread() -> None:
    rng = np.random.default_rng(0)
    ratios, errors = [], []
    for _ in range(200):
        forwards = rng.integers(5, 30, 60)
        tokens = forwards * rng.uniform(1, 5, 60)
        ratios.append(tokens.sum() / forwards.sum())
        errors.append(metrics.ratio_error(list(tokens), list(forwards)))
    assert np.mean(errors) == pytest.approx(
        np.std(ratios), rel=0.15
    )  # the spread of 200 has an error of 5 %
    assert math.isnan(metrics.ratio_error([3], [1])) and math.isnan(metrics.ratio_error([], []))


def test_front() -> None:
    points = [(1.0, 0.9), (2.0, 0.8), (1.5, 0.8), (2.0, 0.8), (3.0, 0.1)]
    assert metrics.pareto_front(points) == [0, 1, 3, 4]


def copies(*passes: tuple[int, int, float]) -> Output:
    """An answer after a prompt's pass; each pass has rows, tokens and seconds."""
    steps = [Step("target", 0, rows, rows, tokens, seconds) for rows, tokens, seconds in passes]
    return output(Step("target", 0, 9, 9, 1, 7.0), *steps, tokens=1 + sum(p[1] for p in passes))


PLAIN, LONG = (1, 1, 0.1), (5, 5, 0.2)


@pytest.mark.parametrize(
    ("answer", "speed"),
    [
        (copies(*[PLAIN, LONG] * 8), 48 * 0.1 / 2.4),
        (copies(*[PLAIN, (5, 1, 0.2)] * 8), 16 * 0.1 / 2.4),
        (copies(*[PLAIN, LONG] * 7), None),
        (copies(*[PLAIN] * 99), None),
        (copies(*[PLAIN, LONG, (1, 1, 0.2)] * 8), None),
        (SPECULATIVE, None),
        (DIFFUSION, None),
        (output(tokens=0), None),
    ],
)
def test_speed_over_plain_is_measured_or_none(answer: Output, speed: float | None) -> None:
    assert speed_over_plain(answer) == (speed and pytest.approx(speed))
