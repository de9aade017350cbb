"""Tests of entries, sweeps, models with random weights, and prompts of a given length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outpace import LLM
from outpace.benchmark.entry import expand_entries
from outpace.benchmark.prompts import cut_prompt, prompts_of_length
from outpace.benchmark.shape import RandomCheckpoints, shape_of
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.load import translate_config
from outpace.cli.options import method_flags, parse_entries, parse_method
from outpace.evaluation.run import questions_of
from outpace.methods import APD, D2F, Autoregressive, LeftToRight


def test_a_sweep_has_an_entry_for_each_value_on_one_line() -> None:
    entries = parse_entries("tiny-dream apd verifier=tiny-aux ratio=0,0.5 window=none")
    assert [entry.setting for entry in entries] == ["ratio=0.0", "ratio=0.5"]
    assert {entry.line for entry in entries} == {"tiny-dream apd verifier=tiny-aux window=none"}
    assert entries[1].method == APD(verifier="tiny-aux", ratio=0.5, window=None)


def test_of_several_sweeps_the_last_runs_along_a_line() -> None:
    options = {"add": [0.1, 1.0], "confidence": [0.7, 0.9], "block": [8]}
    entries = expand_entries("tiny-d2f", "d2f", options)
    assert [(entry.line, entry.setting) for entry in entries] == [
        ("tiny-d2f d2f add=0.1 block=8", "confidence=0.7"),
        ("tiny-d2f d2f add=0.1 block=8", "confidence=0.9"),
        ("tiny-d2f d2f add=1.0 block=8", "confidence=0.7"),
        ("tiny-d2f d2f add=1.0 block=8", "confidence=0.9"),
    ]
    assert entries[2].method == D2F(add=1.0, block=8, confidence=0.7)


def test_an_entry_alone_is_a_line_of_its_own() -> None:
    (entry,) = parse_entries("tiny-ar autoregressive")
    assert (entry.name, entry.setting, entry.has_random_weights) == (
        "tiny-ar autoregressive",
        "",
        False,
    )
    assert parse_entries("random:tiny autoregressive")[0].has_random_weights


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


@pytest.mark.parametrize(
    "method",
    [Autoregressive(), LeftToRight(tokens=2, window=8), APD(verifier="v", lookahead=None)],
)
def test_flags_make_a_method_again(method: Autoregressive) -> None:
    _, name, *rest = method_flags(method)
    values = {flag[2:].replace("-", "_"): v for flag, v in zip(rest[::2], rest[1::2], strict=True)}
    assert parse_method(name, values) == method
    assert method_flags(Autoregressive()) == ["--method", "autoregressive"]


SHAPES = ("tiny", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b", "dream-7b", "llada-8b", "wedlm-8b")


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model(name: str) -> None:
    assert translate_config(shape_of(name)).family in FAMILIES


def test_an_unknown_shape_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=", ".join(SHAPES)):
        shape_of("huge")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape_of("tiny")))
    assert shape_of(str(path)) == shape_of("tiny")


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


def test_prompts_of_a_length_go_on_with_the_next_question() -> None:
    long_prompt = [[1, 2], [3], [4, 5, 6]]
    assert cut_prompt(long_prompt, 0, 4) == [1, 2, 3, 4]
    assert cut_prompt(long_prompt, 2, 8) == [4, 5, 6, 1, 2, 3, 4, 5]
    assert len(cut_prompt(long_prompt, 1, 1000)) == 1000
