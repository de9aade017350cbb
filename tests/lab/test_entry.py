"""Tests of entries, sweeps, and prompts of a given length."""

import pytest

from outpace import LLM
from outpace.lab.entry import MethodEntry, parse_entries
from outpace.lab.run import questions_of
from outpace.lab.side import prompts_of_length
from outpace.methods import APD


def test_a_sweep_has_an_entry_for_each_value_on_one_line() -> None:
    entries = parse_entries("tiny-dream apd verifier=tiny-aux ratio=0,0.5 window=none")
    assert [entry.setting for entry in entries] == ["ratio=0.0", "ratio=0.5"]
    assert {entry.line for entry in entries} == {"tiny-dream apd verifier=tiny-aux window=none"}
    assert entries[1].method == APD(verifier="tiny-aux", ratio=0.5, window=None)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tiny-dflash", "tiny-dflash"),
        ("tiny-ar autoregressive fast", "fast"),
        ("tiny-ar nonsense", "nonsense"),
        ("tiny-dream apd ratio=0.5", "verifier"),
        ("tiny-dream left_to_right tokens=1,", "tokens"),
        ("tiny-dream left_to_right tokens=1,many", "many"),
        ("tiny-dream left_to_right colour=red", "colour"),
        ("tiny-dream left_to_right tokens=0,1", "tokens"),
    ],
)
def test_a_bad_entry_is_named(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        parse_entries(text)


def test_models_are_replaced_by_paths() -> None:
    entry = MethodEntry(model="a", method=APD(verifier="b"), line="a apd", adapter="c")
    found = entry.with_models({"b": "folder", "c": "other"})
    assert (found.model, found.method, found.adapter) == ("a", APD(verifier="folder"), "other")


def test_prompts_have_a_given_length() -> None:
    (question,) = prompts_of_length(LLM("tiny-aux"), questions_of("story", 1), 900)
    assert len(question.prompt) == 900 and question.judge_answer("x") is None
