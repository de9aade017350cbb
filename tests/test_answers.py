"""A file of prompts to a file of training data, killed and gone on with."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.answers import answer_file, answers
from outpace.models.load import ZOO, load_tokenizer
from outpace.training.data import Data, Examples
from outpace.zoo.story import problems

QUESTIONS = [problem.question for problem in problems("test", 9)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The smallest model of the zoo."""
    return LLM("tiny-aux", max_length=160)


def write(path: Path, *records: object) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Its records in the order of the prompts."""
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda record: record["line"])


def prompts(path: Path) -> Path:
    """Both shapes, mixed."""
    plain = [{"prompt": question} for question in QUESTIONS[:6]]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS[6:]]
    return write(path, *plain, *chats)


def test_answers_are_those_of_generate_and_train(llm: LLM, tmp_path: Path) -> None:
    """Every line is there once, and training reads it."""
    target = tmp_path / "new" / "data.jsonl"
    seen: list[tuple[int, int]] = []
    count = answer_file(
        llm,
        prompts(tmp_path / "prompts.jsonl"),
        target,
        batch=4,
        progress=lambda done, total: seen.append((done, total)),
        max_tokens=96,
    )
    assert count == 9 and seen == [(done, 9) for done in range(10)]
    records = read(target)
    assert [record["line"] for record in records] == list(range(1, 10))
    texts = [output.text for output in llm.generate(QUESTIONS, max_tokens=96)]
    assert [record["response"] for record in records[:6]] == texts[:6]
    assert [record["messages"][-1]["content"] for record in records[6:]] == texts[6:]
    tokenizer = load_tokenizer(ZOO / "vocabulary")
    examples = Examples(Data(path=str(target)), tokenizer)
    trained = {tokenizer.decode(examples[n].response[:-1]) for n in range(9)}
    assert trained == set(texts) and all(examples[n].ended for n in range(9))


@pytest.mark.parametrize("torn", [b"", b'{"line": 9, "prom'])
def test_a_killed_run_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    """What stands in the output is not asked again, and half a line is dropped."""
    source, whole, killed = (tmp_path / name for name in ("prompts", "whole", "killed"))
    options = {"batch": 2, "max_tokens": 48, "temperature": 3.0, "seed": 5}
    answer_file(llm, prompts(source), whole, **options)

    def kill(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_file(llm, source, killed, progress=kill, **options)
    assert len(read(killed)) == 4 and not llm.engine.running
    killed.write_bytes(killed.read_bytes() + torn)
    asked: list[int] = []
    submit = llm.submit
    monkeypatch.setattr(llm, "submit", lambda *a, **o: asked.append(1) or submit(*a, **o))
    assert answer_file(llm, source, killed, **options) == len(asked) == 5
    assert read(killed) == read(whole)
    assert answer_file(llm, source, killed, **options) == 0


def test_a_cut_answer_does_not_end_in_training(llm: LLM, tmp_path: Path) -> None:
    """It says that it was cut."""
    target = tmp_path / "data.jsonl"
    answer_file(llm, prompts(tmp_path / "prompts"), target, max_tokens=8)
    assert all(record["finish_reason"] == "length" for record in read(target))
    tokenizer = load_tokenizer(ZOO / "vocabulary")
    example = Examples(Data(path=str(target)), tokenizer)[0]
    assert not example.ended and len(example.response) == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts:2 is not JSON"),
        ("[1]", r"prompts:2 must be an object, not list"),
        ('{"text": "x"}', r"prompts:2 needs a prompt.* found text"),
        ('{"prompt": ""}', r"prompts:2 needs a prompt"),
        ('{"messages": []}', r"prompts:2 needs a prompt"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"prompts:2 needs"),
        ("", r"prompts:2 is not JSON"),
    ],
)
def test_a_bad_line_is_named_before_any_work(
    llm: LLM, tmp_path: Path, line: str, message: str
) -> None:
    """And nothing is written."""
    source = tmp_path / "prompts"
    source.write_text('{"prompt": "x"}\n' + line + '\n{"prompt": "y"}\n')
    with pytest.raises(ValueError, match=message):
        answer_file(llm, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_prompt_without_room_is_named(llm: LLM, tmp_path: Path) -> None:
    """By its line; the engine is left as it was."""
    source = write(tmp_path / "prompts", {"prompt": "x"}, {"prompt": "apples " * 400})
    with pytest.raises(ValueError, match=r"prompts:2: .*slots"):
        answer_file(llm, source, tmp_path / "out", max_tokens=8)
    assert not llm.engine.running and not llm.engine.queue


def test_answers_to_other_prompts_are_refused(llm: LLM, tmp_path: Path) -> None:
    """As are files that cannot be read or are one and the same, and a batch of none."""
    source, target = prompts(tmp_path / "prompts"), tmp_path / "out"
    write(target, {"line": 2, "prompt": "other", "response": "x"})
    with pytest.raises(ValueError, match=r"out:1 answers another prompt"):
        answer_file(llm, source, target)
    write(target, {"prompt": QUESTIONS[0], "response": "x"})
    with pytest.raises(ValueError, match=r"out:1 answers another prompt"):
        answer_file(llm, source, target)
    with pytest.raises(ValueError, match="both input and output"):
        answer_file(llm, source, source)
    with pytest.raises(ValueError, match="no prompts at"):
        answer_file(llm, tmp_path / "none", tmp_path / "new")
    with pytest.raises(ValueError, match="batch must be at least 1, not 0"):
        answer_file(llm, source, tmp_path / "new", batch=0)


def test_prompts_are_taken_as_they_are_needed(llm: LLM) -> None:
    """No more than twice a batch at a time, and leaving early cancels the rest."""
    taken: list[int] = []

    def requests():
        for number in range(9):
            taken.append(number)
            yield f"prompt {number}", QUESTIONS[number], {"max_tokens": 4 + number}

    first = list(islice(answers(llm, requests(), batch=2), 1))
    assert first[0][0] == 0 and len(taken) <= 5
    assert not llm.engine.running and not llm.engine.queue
    assert llm.engine.max_sequences == 256
