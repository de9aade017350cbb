"""Tests of tuning: suggestions, results, and resuming."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="pip install 'outpace[tune]'")

from outpace import LLM
from outpace.benchmark import tune
from outpace.benchmark.entry import MethodEntry
from outpace.benchmark.side import RequestLoad, Side
from outpace.benchmark.tune import TuningSearch, option_distribution, reference_method
from outpace.evaluation.run import questions_of
from outpace.evaluation.samples import Samples, resume_samples
from outpace.methods import APD, METHODS, Autoregressive, LeftToRight
from outpace.methods.method import Interval, OneOf
from outpace.methods.options import method_options


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-dream", prefix_cache=False)


def search(llm: LLM, samples: Samples | None = None, **changes: Any) -> TuningSearch:
    """A search of APD's options, relative to one token per forward."""
    side = Side(
        entry=MethodEntry(model="tiny-dream", method=LeftToRight(), line="one"),
        llm=llm,
        load=RequestLoad(batch=1, max_tokens=16),
        questions=questions_of("story", 2),
        options={"max_tokens": 16, "temperature": 0.0, "method": LeftToRight()},
        task="story",
    )
    asked: dict[str, Any] = {
        "kind": APD,
        "name": "apd",
        "fixed": {"verifier": "tiny-aux"},
        "max_loss": 1.0,
        "by": "tokens_per_forward",
        "seed": 0,
    }
    return TuningSearch(side=side, samples=samples or Samples({}), **asked | changes)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers without a model: more ratio is faster, and wrong above one half."""

    def measured(side: Side) -> dict[str, Any]:
        ratio = getattr(side.entry.method, "ratio", 0.0)
        speed = 1 + 10 * ratio
        figures = {"setting": side.entry.setting, "line": side.entry.line}
        return {**figures, "accuracy": 0.9 if ratio <= 0.5 else 0.2, "tokens_per_forward": speed}

    monkeypatch.setattr(tune, "measure_side", measured)


@pytest.mark.parametrize("name", METHODS)
def test_bounds_beside_options_are_values_that_options_take(name: str) -> None:
    kind = METHODS[name]
    further: Mapping[str, Any] = dict.fromkeys(kind.roles, "m")
    for option in method_options(kind).values():
        match option.search:
            case OneOf(values):
                ends = values
            case Interval(low, high, log):
                assert low < high and (low > 0 or not log)
                ends = (int(low), int(high)) if option.kind is int else (low, high)
                if isinstance(option.default, int | float):
                    assert low <= option.default <= high
            case None:
                continue
        for end in ends:
            made = {**further, option.name: end}
            if (name, option.name) == ("left_to_right", "tokens"):
                made["lookahead"] = 128
            assert getattr(kind(**made), option.name) == end
        assert option_distribution(option)


def test_the_careful_way_is_one_token_at_a_time(llm: LLM) -> None:
    assert reference_method(llm) == LeftToRight()
    assert (
        reference_method(LLM("tiny-wedlm")) == reference_method(LLM("tiny-ar")) == Autoregressive()
    )


def test_the_fastest_that_keeps_the_accuracy_is_found(llm: LLM, scripted: None) -> None:
    found = search(llm)
    found.run_trials(30, lambda record: None)
    first = found.trials[0]
    assert first["parameters"] == {"ratio": 0.7, "window": 16, "lookahead": 100}
    assert first["value"] == pytest.approx(-69)  # 70 points are lost, of which one may be
    values = [record["value"] for record in found.best_trials(3)]
    assert values == sorted(values, reverse=True) and len(values) == 3
    assert 5 < values[0] <= 6
    assert all(record["result"]["accuracy"] == 0.9 for record in found.best_trials(30))


def test_a_killed_search_goes_on_as_if_nothing_had_been(
    llm: LLM, scripted: None, tmp_path: Path
) -> None:
    whole = search(llm)
    whole.run_trials(14, lambda record: None)

    class Killed(Exception):
        pass

    def kill(record: Any) -> None:
        if len(cut.trials) == 6:
            raise Killed

    with resume_samples(tmp_path / "a.jsonl", {}) as samples:
        cut = search(llm, samples)
        with pytest.raises(Killed):
            cut.run_trials(14, kill)
    with resume_samples(tmp_path / "a.jsonl", {}) as samples:
        again = search(llm, samples)
        seen: list[Any] = []
        again.run_trials(14, seen.append)
    assert len(seen) == 8
    assert [r["parameters"] for r in again.trials] == [r["parameters"] for r in whole.trials]
