"""Figures of papers as data, and whether results look like them."""

import tomllib
from dataclasses import replace
from itertools import product
from shlex import split
from typing import Any

import pytest

from outpace.checkpoints.hub import zoo_names
from outpace.lab.protocol import find_setting
from outpace.lab.reproduce import figure
from outpace.lab.reproduce.figure import (
    PAPERS,
    SCALES,
    Claim,
    Figure,
    figures,
    find,
    find_at,
    needed,
    words_of,
)
from outpace.lab.reproduce.verdict import (
    FAILS,
    HOLDS,
    SMALL,
    UNTESTED,
    judge,
    judge_figure,
    published_value,
)
from outpace.training.recipe import load_recipe
from refusal import refuses

EVERY = [figure for paper in PAPERS for figure in figures(paper)]
each = pytest.mark.parametrize("figure", EVERY, ids=lambda f: f"{f.paper}:{f.name}")


def result(
    setting: str, right: int, tokens: int, faster: tuple[float, float, float] | None = None
) -> dict[str, Any]:
    """A result of a hundred answers, of ten forwards each, with its speed over the first line."""
    verdicts = [True] * right + [False] * (100 - right)
    return {
        "file": "a",
        "task": "story",
        "questions": "q",
        "problems": 100,
        "setting": setting,
        "accuracy": right / 100,
        "tokens_per_forward": tokens / 10,
        "tokens_per_cpu_second": 100 * (faster or [1.0])[0],
        "clock": "cpu",
        "faster": faster and {"ratio": faster[0], "interval": [*faster[1:]]},
        "line": "x",
        "method": "APD(verifier='v')",
        "samples": {
            "right": verdicts,
            "tokens": [tokens] * 100,
            "forwards": [10] * 100,
            "seconds": [tokens / 10] * 100,
        },
    }


@each
def test_a_figure_can_be_drawn(figure: Figure) -> None:
    assert figure.published() and figure.claims
    assert len(figure.scales["full"]) == 1
    for name, plan in ((name, plan) for name, plans in figure.scales.items() for plan in plans):
        lines = plan.entries
        assert plan.setting().task == plan.task and figure.claims_at(name)
        assert len({entry.name for entry in plan.every}) == len(plan.every)
        for claim in figure.claims_at(name):
            assert set(claim.scales) <= set(SCALES)
            assert (claim.than is None) == (claim.trend in ("rises", "falls"))
            assert {claim.trend} <= {"rises", "falls", "higher", "lower", "kept", "unbeaten"}
            assert {*claim.note, *claim.why} <= {*claim.scales}
            assert bool(claim.over) <= (claim.key == "gain") and len(claim.over) in (0, 2)
            mine = lines[claim.line - 1]
            if claim.trend in ("rises", "falls"):
                assert len(mine) > 1 and all(entry.setting for entry in mine)
            if claim.trend in ("higher", "lower"):
                settings = [e.setting for e in lines[claim.than - 1]]
                assert len(settings) == 1 or settings == [e.setting for e in mine]
                assert not claim.at or claim.at in [e.setting for e in mine]
    for mini in figure.scales.get("mini", ()):
        names = {name for entry in mini.every for name in entry.model_names}
        assert names - set(needed(mini.every)) <= set(zoo_names())


@each
def test_what_the_paper_has_of_a_claim_agrees_with_it(figure: Figure) -> None:
    tasks = {plan.task for plans in figure.scales.values() for plan in plans}
    for claim, task in product(figure.claims, tasks):
        points = figure.pair(claim, task)
        assert len(points) in (0, 2)
        if points and claim.trend != "kept":
            first, last = (published_value(point, claim.key)[1] for point in points)
            assert claim.trend != "unbeaten"
            assert (last > first) is (claim.trend in ("rises", "higher"))


def test_what_trains_models_is_known_and_used() -> None:
    names = {
        scale: {n for f in EVERY for plan in f.scales.get(scale, ()) for n in needed(plan.every)}
        for scale in ("mini", "full")
    }
    assert not names["mini"] & names["full"]
    table = tomllib.loads(figure.TABLE.read_text())
    assert {f"trained:{name}" for name in table} == names["mini"] | names["full"]
    for name in table:
        recipe, *overrides = split(words_of(f"trained:{name}"))
        read = load_recipe(recipe, overrides)
        if f"trained:{name}" in names["mini"]:
            models = {read.model.init, read.model.target} - {None, *zoo_names()}
            assert models <= {f"trained:{base}" for base in table}
            assert read.data.path == "story:train" and read.train.steps <= 1200


def test_a_model_is_trained_after_the_one_that_it_starts_from() -> None:
    (plan,) = find("d2f:noise")[0].scales["mini"]
    alone = [replace(entry, model="tiny-dream") for entry in plan.every]
    assert [*needed(alone)] == [
        f"trained:{n}" for n in ("dream-plain", "student-short", "student-random")
    ]


def test_a_given_model_takes_its_path_in_every_line() -> None:
    (plan, *_) = find("dflash:table1")[0].scales["small"]
    paths = {"target": "a.gguf", "dflash": "b", "eagle": "c"}
    models = [entry.model_names for entry in plan.with_models(paths).every]
    assert models[:2] == [["a.gguf"], ["a.gguf", "b"]] and not plan.with_models(paths).given
    fewer = plan.with_models({"target": "a", "dflash": "b"})
    assert [len(line) for line in fewer.entries] == [1, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="target=PATH"):
        plan.with_models({"dflash": "b"})
    (prose,) = find("apd:prose")[0].scales["small"]
    assert prose.with_models({"target": "a", "dream": "b", "judge": "c"}).judge == "c"
    with refuses("model"):
        prose.with_models({"target": "a", "dream": "b", "judge": "a"})


def test_a_line_is_measured_with_several_requests_at_a_time() -> None:
    (plan,) = find("dflash:concurrency")[0].scales["mini"]
    assert [[entry.batch for entry in line] for line in plan.entries] == [[1, 4, 16, 32]] * 4
    assert len({entry.name for entry in plan.every}) == 16
    with pytest.raises(ValueError, match="batch"):
        _ = replace(plan, lines=[{**plan.lines[1], "tokens": [3, 7]}]).entries


def test_a_claim_names_each_published_point_alone() -> None:
    (figure,) = find("apd:figure2")
    for point in ({"tokens": 9}, {"tokens": 2}):  # no point has nine tokens, two have two
        with pytest.raises(ValueError, match="published"):
            figure.pair(Claim(text="so", line=1, trend="rises", points=[point]))
        with pytest.raises(ValueError, match="published"):
            figure.point(point)
    for name in ("nobody", "apd:figure9"):
        with pytest.raises(ValueError, match=name):
            find(name)
    with refuses("scale"):
        find_at("d2f:noise", "small")


def test_lines_have_the_settings_of_their_paper() -> None:
    (pareto,) = find("apd:figure5")[0].scales["full"]
    fixed, *adaptive, small, large, drafted = pareto.entries
    published = [find_setting("gsm8k", f"apd:ratio-{r}").build_method() for r in (0.6, 0.7)]
    assert [entry.method for (entry,) in adaptive] == published and not fixed[0].protocol
    protocols = [entry.protocol for entry in (*small, *large, *drafted)]
    assert protocols == ["apd:qwen-0.5b", "apd:qwen-7b", "apd:qwen-7b"]
    settings = [find_setting("gsm8k", entry.protocol or pareto.protocol) for entry in pareto.every]
    assert max(setting.max_tokens for setting in settings) == 16384 and not pareto.max_tokens
    swept = find("d2f:table3")[0].scales["full"][0].entries[0]
    assert swept[0].setting == "activate=0.95 confidence=0.95" != swept[1].setting
    assert swept[0].line == swept[1].line and "confidence" not in swept[0].line


def claim(
    trend: str, key: str = "tokens_per_forward", than: int | None = None, **given: Any
) -> Claim:
    return Claim(text="so", line=1, trend=trend, key=key, than=than, **given)


def verdict(claim: Claim, *lines: list[dict[str, Any]], points: Any = (), by: str = "") -> str:
    return judge(claim, lines, points, by)[0]


def test_a_line_changes_beyond_chance_alone() -> None:
    line = [result("a=1", 90, 10), result("a=2", 70, 20), result("a=3", 50, 30)]
    assert verdict(claim("rises"), line) == HOLDS and verdict(claim("falls"), line) == FAILS
    assert verdict(claim("falls", "accuracy"), line) == HOLDS
    assert verdict(claim("rises", "latency"), line) == HOLDS
    assert verdict(claim("rises", "tokens_per_answer"), line) == HOLDS
    assert verdict(claim("rises", "acceptance_length"), line) == UNTESTED
    close = [line[0], result("a=2", 89, 10)]
    for trend in ("rises", "falls"):
        assert verdict(claim(trend, "accuracy"), close) == SMALL
        assert verdict(claim(trend), close) == SMALL
    # An interval without the change that the paper has is no lack of problems.
    points = [{"accuracy": 80}, {"accuracy": 50}]
    assert verdict(claim("falls", "accuracy"), close, points=points) == FAILS
    nearer = [{"accuracy": 80}, {"accuracy": 78}]
    assert verdict(claim("falls", "accuracy"), close, points=nearer) == SMALL
    unsolved = [result("a=1", 0, 10), result("a=2", 0, 20)]  # an interval without width
    assert verdict(claim("falls", "accuracy"), unsolved, points=points) == SMALL


def test_speeds_differ_beyond_the_noise_of_their_rounds() -> None:
    first, slow, fast = (
        [result("", 90, 10, faster)] for faster in (None, (1.1, 0.98, 1.2), (1.5, 1.3, 1.6))
    )
    higher, lower = claim("higher", "speed", 2), claim("lower", "speed", 2)
    assert verdict(higher, fast, first) == verdict(lower, first, fast) == HOLDS
    assert verdict(higher, first, fast) == verdict(lower, fast, first) == FAILS
    assert verdict(higher, slow, first) == verdict(lower, slow, first) == SMALL
    # The errors of two lines add up: 1.36 times, of which 1.16 is the least.
    for factor, expected in ((1.1, HOLDS), (1.3, SMALL), (1.7, FAILS)):
        assert verdict(replace(higher, factor=factor), fast, slow) == expected
    points = [{"tokens_per_second": 10}, {"tokens_per_second": 30}]
    assert verdict(higher, slow, first, points=points) == FAILS
    fast[0]["faster"]["interval"] = None
    assert verdict(higher, fast, first) == UNTESTED


def test_gains_are_over_the_first_line_or_plain_ones() -> None:
    falling = [result(f"a={n}", 90, 10, (4 / n, 3.8 / n, 4.2 / n)) for n in (1, 2)]
    assert verdict(claim("falls", "gain"), falling) == HOLDS
    assert verdict(claim("rises", "gain"), falling) == FAILS
    ratios = (4.0, 6.0, 1.0, 3.0)  # 4 times one plain line, and twice the other
    lines = [[result("", 90, 10, (r, 0.9 * r, 1.1 * r))] for r in ratios]
    gains = claim("higher", "gain", 2, over=(3, 4))
    found, words = judge(gains, lines)
    assert found == HOLDS and words.startswith("2 → 4, 2.00 times")
    assert verdict(claim("higher", "speed", 2), *lines) == FAILS


def test_accuracy_is_kept_within_a_margin() -> None:
    before, same, worse = ([result("", right, 10)] for right in (90, 90, 70))
    kept = claim("kept", "accuracy", 2)
    assert [verdict(kept, mine, before) for mine in (same, worse)] == [HOLDS, FAILS]
    before[0]["samples"]["right"].reverse()  # as many, of other answers
    assert verdict(kept, same, before) == SMALL


def test_acceptance_lengths_have_an_interval_if_answers_have_them() -> None:
    line = [{**result(f"a={n}", 90, 10), "acceptance_length": n} for n in (6.0, 6.2)]
    for order in (1, -1):
        for each, step in zip(line, (1, order), strict=True):
            length = each["acceptance_length"]
            answers = [length - 5, length + 5] * 49
            each["samples"]["acceptance"] = [None, length, *answers[::step]]
        expected = HOLDS if order == 1 else SMALL
        assert verdict(claim("rises", "acceptance_length"), line) == expected


def test_a_line_is_compared_with_another_at_each_setting() -> None:
    mine = [result("a=1", 90, 20), result("a=2", 90, 30)]
    other = [result("a=1", 90, 10), result("a=2", 90, 20)]
    assert verdict(claim("higher", than=2), mine, other) == HOLDS
    assert verdict(claim("lower", than=2), mine, other) == FAILS
    assert verdict(claim("higher", than=2), mine, [result("", 90, 15)]) == HOLDS
    other[1] = result("a=2", 90, 30)
    assert verdict(claim("higher", than=2), mine, other) == SMALL
    assert verdict(claim("higher", than=2, at="a=1"), mine, other) == HOLDS


def test_a_line_is_beaten_by_what_is_surely_faster_and_as_right() -> None:
    unbeaten = claim("unbeaten", than=2)
    mine, other = [result("a=1", 90, 20)], [result("k=1", 95, 10), result("k=2", 70, 30)]
    assert verdict(unbeaten, mine, other) == HOLDS
    assert verdict(unbeaten, mine, [*other, result("k=3", 90, 21)]) == FAILS
    assert verdict(unbeaten, mine, [*other, result("k=4", 89, 21)]) == SMALL  # surely faster alone
    assert verdict(unbeaten, mine, [*other, result("k=5", 91, 20)]) == SMALL
    by_speed = replace(unbeaten, key="speed")
    near, far = ([result("", 90, 20, (1.2, low, 1.3))] for low in (0.9, 1.1))
    assert verdict(by_speed, near, mine) == SMALL and verdict(by_speed, far, mine) == HOLDS


def test_a_verifier_does_not_judge_its_own_text() -> None:
    line = [result("a=1", 90, 10), result("a=2", 90, 10)]
    for each, size in zip(line, (-1.0, -2.0), strict=True):
        each["likelihood"] = size
        each["samples"] |= {"likelihood": [size] * 100, "judged": [1] * 100}
    falls = claim("falls", "likelihood")
    assert verdict(falls, line, by="w") == HOLDS and verdict(falls, line, by="v") == UNTESTED
    unbeaten = claim("unbeaten", than=2)
    assert verdict(unbeaten, line[:1], line[1:], by="w") == HOLDS
    assert verdict(unbeaten, line[:1], line[1:], by="v") == UNTESTED


def test_lines_that_were_not_measured_have_no_claims() -> None:
    (figure,) = find("d2f:students")
    (plan,) = figure.scales["mini"]
    results = [result("", 90, tokens) for tokens in (10, 20, 30)]
    verdicts = judge_figure(figure, "mini", plan, {"results": results, "lines": [1, 1, 1]})
    assert [each.claim for each in verdicts] == [figure.claims[0].text]
