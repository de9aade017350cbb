"""Tests of alternating turns, and of the figures of sides."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.decoding import Step
from outpace.lab.compare import bootstrap_differences
from outpace.lab.entry import MethodEntry
from outpace.lab.run import evaluate, questions_of
from outpace.lab.side import (
    RequestLoad,
    Side,
    SideTurn,
    alternate_turns,
    milliseconds_per_forward,
    relative_speed,
    summarise_sides,
)
from outpace.methods import Autoregressive
from refusal import refuses

QUESTIONS = questions_of("story", 6)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-aux", prefix_cache=False)


@pytest.fixture(autouse=True)
def without_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage before each turn: that of the test run takes longer than the turns."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def side(llm: LLM, name: str = "a", **changes: Any) -> Side:
    entry = MethodEntry(model="tiny-aux", method=Autoregressive(), line=name)
    return Side(
        entry=entry,
        llm=llm,
        load=RequestLoad(batch=1, max_tokens=6),
        questions=QUESTIONS,
        options={"max_tokens": 6, "temperature": 0.0, "method": entry.method},
        task="story",
        **changes,
    )


def turn(tokens: int, cpu: float) -> SideTurn:
    steps = [Step("target", 0, 1, 1, 1, 0.01) for _ in range(10)]
    output = Output(
        text="", ids=[0] * tokens, finish_reason="stop", steps=steps, prompt_tokens=3, seconds=1.0
    )
    return SideTurn([output], cpu, 2 * cpu)


def test_sides_take_turns_in_alternating_order(llm: LLM) -> None:
    order: list[str] = []
    sides = [side(llm, "a"), side(llm, "b")]
    rounds = list(alternate_turns(sides, 3, progress=lambda s: order.append(s.entry.line)))
    assert "".join(order) == "abbaab" and rounds == [1, 2, 3]
    for each in sides:
        assert [len(turn.outputs) for turn in each.turns] == [2, 2, 2]


def test_turns_come_to_what_an_evaluation_comes_to(llm: LLM) -> None:
    sides = [side(llm), side(llm, "b")]
    for _ in alternate_turns(sides, 2):
        pass
    first, other = summarise_sides(sides, 2)
    options: Options = {"method": "autoregressive", "max_tokens": 6, "temperature": 0.0}
    report = evaluate(llm, QUESTIONS, task="story", **options).to_record()
    same = ("task", "questions", "accuracy", "tokens_per_forward", "acceptance_histogram")
    assert {key: first[key] for key in same} == {key: report[key] for key in same}
    assert first["faster"] is None and other["faster"]["interval"] is None
    assert other["faster"]["ratio"] > 0 and other["clock"] == "cpu"
    assert bootstrap_differences(first, other)["tokens_per_forward"].value == 0
    assert first["ms_per_pass"]["target"]["rows"] > 1 and first["ms_per_forward"]["cpu"] > 0


def test_a_batch_needs_questions_for_each_round(llm: LLM) -> None:
    wide = replace(side(llm), load=RequestLoad(batch=4, max_tokens=12))
    with pytest.raises(ValueError, match="at least 8"):
        next(alternate_turns([side(llm), wide], 2))
    with refuses("rounds"):
        next(alternate_turns([side(llm)], 0))
    assert wide.turns == []


@pytest.mark.nightly
def test_a_killed_run_goes_on_with_its_turns(llm: LLM, tmp_path: Path) -> None:
    first = [side(llm, "a"), side(llm, "b")]
    running = alternate_turns(first, 3, samples=tmp_path)
    assert next(running) == 1
    running.close()
    again = [side(llm, "a"), side(llm, "b")]
    assert list(alternate_turns(again, 3, samples=tmp_path)) == [1, 2, 3]
    for before, after in zip(first, again, strict=True):
        assert after.turns[0].cpu == before.turns[0].cpu
        assert after.turns[0].outputs[0].ids == before.turns[0].outputs[0].ids
    assert len(list(tmp_path.iterdir())) == 2
    other = [side(llm, "a"), side(llm, "c")]
    assert list(alternate_turns(other, 3, samples=tmp_path)) == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_ratio_is_the_median_of_the_rounds(llm: LLM) -> None:
    mine, its = side(llm), side(llm, "b")
    mine.turns = [turn(20, 1.0), turn(20, 1.0), turn(20, 50.0)]
    its.turns = [turn(10, 1.0)] * 3
    assert relative_speed(mine, its, 3, "cpu") == {"ratio": 2.0, "interval": None}
    assert relative_speed(mine, its, 2, "wall") == {"ratio": 2.0, "interval": None}
    its.turns = [turn(0, 1.0)] * 3
    assert relative_speed(mine, its, 3, "cpu") is None
    assert milliseconds_per_forward(mine.turns, "cpu") == 100.0
