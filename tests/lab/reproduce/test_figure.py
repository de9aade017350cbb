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
from outpace.lab.reproduce.verdict import NAMES, judge, published
from outpace.training.recipe import load_recipe
from refusal import refuses

EVERY = [figure for paper in PAPERS for figure in figures(paper)]
each = pytest.mark.parametrize("figure", EVERY, ids=lambda f: f"{f.paper}:{f.name}")


def result(setting: str, right: int, tokens: int, seconds: float = 1.0) -> dict[str, Any]:
    """A result of a hundred answers, of ten forwards each."""
    verdicts = [True] * right + [False] * (100 - right)
    return {
        "file": "a",
        "task": "story",
        "questions": "q",
        "problems": 100,
        "setting": setting,
        "accuracy": right / 100,
        "tokens_per_forward": tokens / 10,
        "tokens_per_cpu_second": 100 * tokens / seconds,
        "clock": "cpu",
        "samples": {"right": verdicts, "tokens": [tokens] * 100, "forwards": [10] * 100},
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
            mine = lines[claim.line - 1]
            if claim.trend in ("rises", "falls"):
                assert len(mine) > 1 and all(entry.setting for entry in mine)
            if claim.trend in ("higher", "lower"):
                assert [e.setting for e in mine] == [e.setting for e in lines[claim.than - 1]]
    for mini in figure.scales.get("mini", ()):
        names = {name for entry in mini.every for name in entry.model_names}
        assert names - set(needed(mini.every)) <= set(zoo_names())


@each
def test_what_the_paper_has_of_a_claim_agrees_with_it(figure: Figure) -> None:
    tasks = {plan.task for plans in figure.scales.values() for plan in plans}
    for claim, task in product(figure.claims, tasks):
        points = figure.pair(claim, task)
        assert len(points) == (2 if published(figure, claim, task) else 0)
        if points:
            name = next(n for n in NAMES.get(claim.key, (claim.key,)) if n in points[0])
            first, last = (point[name] for point in points)
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
            assert {read.model.init, read.model.target} <= {None, *zoo_names()}
            assert read.data.path == "story:train" and read.train.steps <= 800


def test_a_given_model_takes_its_path_in_every_line() -> None:
    (plan, *_) = find("dflash:table1")[0].scales["small"]
    paths = {"target": "a.gguf", "dflash": "b", "eagle": "c"}
    models = [entry.model_names for entry in plan.with_models(paths).every]
    assert models[:2] == [["a.gguf"], ["a.gguf", "b"]] and not plan.with_models(paths).given
    fewer = plan.with_models({"target": "a", "dflash": "b"})
    assert [len(line) for line in fewer.entries] == [1, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="target=PATH"):
        plan.with_models({"dflash": "b"})


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
    fixed, *adaptive, small, large = pareto.entries
    published = [find_setting("gsm8k", f"apd:ratio-{r}").build_method() for r in (0.6, 0.7)]
    assert [entry.method for (entry,) in adaptive] == published and not fixed[0].protocol
    assert [entry.protocol for entry in (*small, *large)] == ["apd:qwen-0.5b", "apd:qwen-7b"]
    settings = [find_setting("gsm8k", entry.protocol or pareto.protocol) for entry in pareto.every]
    assert max(setting.max_tokens for setting in settings) == 16384 and not pareto.max_tokens
    swept = find("d2f:table3")[0].scales["full"][0].entries[0]
    assert swept[0].setting == "activate=0.95 confidence=0.95" != swept[1].setting
    assert swept[0].line == swept[1].line and "confidence" not in swept[0].line


def claim(trend: str, key: str = "tokens_per_forward", than: int | None = None) -> Claim:
    return Claim(text="so", line=1, trend=trend, key=key, than=than)


def test_a_line_changes_beyond_chance_alone() -> None:
    line = [result("a=1", 90, 10), result("a=2", 70, 20), result("a=3", 50, 30)]
    assert judge(claim("rises"), [line]).holds and not judge(claim("falls"), [line]).holds
    assert judge(claim("falls", "accuracy"), [line]).holds
    for other, key in (
        (result("a=2", 89, 10), "accuracy"),
        (result("a=2", 89, 10), "tokens_per_forward"),
        (result("a=2", 90, 10, 0.97), "speed"),
    ):
        trend = "falls" if key == "accuracy" else "rises"
        assert not judge(claim(trend, key), [[line[0], other]]).holds
    assert judge(claim("rises", "speed"), [[line[0], result("a=2", 90, 10, 0.9)]]).holds


def test_acceptance_lengths_have_an_interval_if_answers_have_them() -> None:
    line = [{**result(f"a={n}", 90, 10), "acceptance_length": n} for n in (6.0, 6.2)]
    assert not judge(claim("rises", "acceptance_length"), [line]).holds  # by less than 5 %
    for order in (1, -1):
        for each, step in zip(line, (1, order), strict=True):
            length = each["acceptance_length"]
            answers = [length - 5, length + 5] * 49
            each["samples"]["acceptance"] = [None, length, *answers[::step]]
        assert judge(claim("rises", "acceptance_length"), [line]).holds == (order == 1)


def test_a_line_is_compared_with_another_at_each_setting() -> None:
    mine = [result("a=1", 90, 20), result("a=2", 90, 30)]
    other = [result("a=1", 90, 10), result("a=2", 90, 20)]
    assert judge(claim("higher", than=2), [mine, other]).holds
    assert not judge(claim("lower", than=2), [mine, other]).holds
    other[1] = result("a=2", 90, 30)
    assert not judge(claim("higher", than=2), [mine, other]).holds
    assert judge(replace(claim("higher", than=2), at="a=1"), [mine, other]).holds


def test_a_gain_is_the_speed_over_the_first_line() -> None:
    line = [{**result(f"a={n}", 90, 10, n), "faster": {"ratio": 4 - n}} for n in (1, 2)]
    assert judge(claim("falls", "gain"), [line]).holds
    assert not judge(claim("rises", "gain"), [line]).holds


def test_a_line_is_beaten_by_what_is_as_right_and_faster() -> None:
    mine, other = [result("a=1", 90, 20)], [result("k=1", 95, 10), result("k=2", 80, 30)]
    assert judge(claim("unbeaten", than=2), [mine, other]).holds
    faster = [*other, result("k=3", 90, 21)]
    assert not judge(claim("unbeaten", than=2), [mine, faster]).holds
