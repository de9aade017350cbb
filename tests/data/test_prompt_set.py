"""Training data from a model's answers: splitting, resuming, overlaps, and its origin."""

import json
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.checkpoints.fingerprint import Fingerprint
from outpace.data.generated.story import story_problems
from outpace.data.prompt_set import OverlapIndex, make_data, read_prompt_set

QUESTIONS = [problem.question for problem in story_problems("test", 12)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-aux", max_length=160)


def write_prompts(path: Path, texts: list[str]) -> Path:
    """Write a file of prompts, with a byte order mark and blank lines."""
    path.write_text("\ufeff" + "".join(json.dumps({"prompt": text}) + "\n\n" for text in texts))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file in the order of their prompts."""
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda each: each["line"])


def fingerprint(llm: LLM, **template: Any) -> Fingerprint:
    return Fingerprint.of(llm.name, llm.text.tokenizer, template)


def make(llm: LLM, source: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """Make data of a file, a third of it held out."""
    prompts = read_prompt_set([source], held_out=1 / 3)
    options = {"max_tokens": 24, "temperature": 0.0, **options}
    return make_data(llm, fingerprint(llm), prompts, folder, batch=4, **options)


def test_every_prompt_is_answered_once_in_one_of_two_files(llm: LLM, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", [*QUESTIONS, f" {QUESTIONS[0]}  "])
    card = make(llm, source, tmp_path / "data")
    held, trained = (read_lines(tmp_path / "data" / name) for name in ("held.jsonl", "train.jsonl"))
    assert held and trained and card["prompts"]["repeated"] == 1
    answers = {record["prompt"]: record["response"] for record in (*held, *trained)}
    outputs = llm.generate(QUESTIONS, max_tokens=24, temperature=0.0)
    assert answers == {text: output.text for text, output in zip(QUESTIONS, outputs, strict=True)}
    assert {json.dumps(each["fingerprint"]) for each in (*held, *trained)} == {
        json.dumps(fingerprint(llm).as_record())
    }
    counts = card["files"]["train.jsonl"]
    assert counts["answers"] == len(trained)
    cut = sum(output.finish_reason == "length" for output in outputs)
    assert counts["truncated"] + card["files"]["held.jsonl"]["truncated"] == cut


def test_prompts_that_exceed_the_context_are_left_out(llm: LLM, tmp_path: Path) -> None:
    texts = ["How many? " * 100, *QUESTIONS[:3]]
    source, folder = write_prompts(tmp_path / "prompts.jsonl", texts), tmp_path / "data"
    chosen = read_prompt_set([source])
    for _ in range(2):
        card = make_data(llm, fingerprint(llm), chosen, folder, max_tokens=24, temperature=0.0)
        assert card["prompts"]["too_long"] == 1
        assert [line["line"] for line in read_lines(folder / "train.jsonl")] == [2, 3, 4]


def test_an_interrupted_run_continues(llm: LLM, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", QUESTIONS[:8])
    whole, folder = tmp_path / "whole", tmp_path / "data"
    make(llm, source, whole)
    make(llm, source, folder)
    text = (folder / "train.jsonl").read_bytes()
    (folder / "train.jsonl").write_bytes(text[: len(text) // 2])
    make(llm, source, folder)
    for name in ("train.jsonl", "held.jsonl"):
        assert read_lines(folder / name) == read_lines(whole / name)
    make(llm, write_prompts(source, QUESTIONS), folder, seed=0)
    held, earlier = read_lines(folder / "held.jsonl"), read_lines(whole / "held.jsonl")
    assert held[: len(earlier)] == earlier
    assert len(held) + len(read_lines(folder / "train.jsonl")) == len(QUESTIONS)


def test_other_options_and_models_are_rejected_by_name(llm: LLM, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl", QUESTIONS[:4])
    make(llm, source, tmp_path / "data")
    before = (tmp_path / "data" / "train.jsonl").read_bytes()
    for changed in ({"max_tokens": 8}, {"seed": 1}):
        with pytest.raises(ValueError, match="options"):
            make(llm, source, tmp_path / "data", **changed)
    with pytest.raises(ValueError, match="fingerprint"):
        other = fingerprint(llm, enable_thinking=True)
        prompts = read_prompt_set([source], held_out=1 / 3)
        options: Any = {"max_tokens": 24, "temperature": 0.0}
        make_data(llm, other, prompts, tmp_path / "data", **options)
    assert (tmp_path / "data" / "train.jsonl").read_bytes() == before


def test_prompts_that_share_ten_words_with_a_file_are_left_out(tmp_path: Path) -> None:
    words = "One two, three four; five six seven eight nine ten eleven."
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"task": {"text": [words]}}) + "\n")
    same = "zero " + words.upper().replace(",", " -")
    less = "one two three four five six seven eight nine TEN"
    texts = [same, less, less.removesuffix(" TEN"), QUESTIONS[0]]
    chosen = read_prompt_set([write_prompts(tmp_path / "p.jsonl", texts)], exclude=[test])
    assert [*chosen.training.values()] == texts[2:]
    assert chosen.overlapping == {str(test): 2}
    assert OverlapIndex([test]).find_overlap([{"content": f"{QUESTIONS[0]} {words}"}]) == test


def test_files_without_prompts_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="^prompts"):
        read_prompt_set([tmp_path / "empty.txt"])
    short = write_prompts(tmp_path / "p.jsonl", ["too short"])
    with pytest.raises(ValueError, match="^exclude"):
        read_prompt_set([short], exclude=[short])
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="bytes.txt"):
        read_prompt_set([tmp_path / "bytes.txt"])
