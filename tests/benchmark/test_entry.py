"""Tests of entries, sweeps, models with random weights, and prompts of a given length."""

from pathlib import Path

import pytest
import torch

from outpace import LLM
from outpace.benchmark.shape import RandomCheckpoints
from outpace.benchmark.side import prompts_of_length
from outpace.cli.options import parse_entries
from outpace.evaluation.run import questions_of
from outpace.methods import APD


def test_a_sweep_has_an_entry_for_each_value_on_one_line() -> None:
    entries = parse_entries("tiny-dream apd verifier=tiny-aux ratio=0,0.5 window=none")
    assert [entry.setting for entry in entries] == ["ratio=0.0", "ratio=0.5"]
    assert {entry.line for entry in entries} == {"tiny-dream apd verifier=tiny-aux window=none"}
    assert entries[1].method == APD(verifier="tiny-aux", ratio=0.5, window=None)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tiny-ar", "tiny-ar"),
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


def test_random_weights_are_written_once_and_decode(tmp_path: Path) -> None:
    shapes = RandomCheckpoints(folder=tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    path = shapes.model_path("random:tiny")
    assert shapes.model_path("random:tiny") == path and shapes.model_path("tiny-ar") == "tiny-ar"
    assert shapes.resolve_method(APD(verifier="random:tiny")) == APD(verifier=path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]
    llm = LLM(path)
    (question,) = prompts_of_length(llm, questions_of("story", 1), 9)
    assert len(question.prompt) == 9 and question.judge_answer("x") is None
    (output,) = llm.generate([question.prompt], max_tokens=4, temperature=0.0)
    assert len(output.ids) == 4
