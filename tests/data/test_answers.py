"""Answers to a file of prompts as training data, and resuming a killed run."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.data.answers import answer_file
from outpace.data.generated.story import story_problems
from outpace.training.data import Data, Examples
from refusal import refuses

QUESTIONS = [problem.question for problem in story_problems("test", 9)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-aux", max_length=160)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda record: record["line"])


def prompts(path: Path) -> Path:
    plain = [{"prompt": question} for question in QUESTIONS[:6]]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS[6:]]
    return write(path, *plain, *chats)


def test_answers_are_those_of_generate_and_train(llm: LLM, tmp_path: Path) -> None:
    target = tmp_path / "new" / "data.jsonl"
    seen: list[tuple[int, int]] = []
    count = answer_file(
        llm,
        prompts(tmp_path / "prompts.jsonl"),
        target,
        batch=4,
        progress=lambda done, total, tokens: seen.append((done, total)),
        max_tokens=96,
    )
    assert count == 9 and seen == [(done, 9) for done in range(10)]
    records = read(target)
    assert [record["line"] for record in records] == list(range(1, 10))
    texts = [output.text for output in llm.generate(QUESTIONS, max_tokens=96)]
    assert [record["response"] for record in records[:6]] == texts[:6]
    assert [record["messages"][-1]["content"] for record in records[6:]] == texts[6:]
    tokenizer = load_tokenizer(ZOO_FOLDER / "vocabulary")
    examples = Examples(Data(path=str(target)), tokenizer)
    trained = {tokenizer.decode(examples[n].response[:-1]) for n in range(9)}
    assert trained == set(texts) and all(examples[n].ended for n in range(9))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "torn", [b"", b"{", b'{"line": 9, "mess', b'{"line": 5, "prompt": "%b", "resp']
)
def test_a_killed_run_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    source, whole, killed = (tmp_path / name for name in ("prompts", "whole", "killed"))
    options = {"batch": 2, "max_tokens": 48, "temperature": 3.0, "seed": 5}
    answer_file(llm, prompts(source), whole, **options)

    def kill(done: int, total: int, tokens: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_file(llm, source, killed, progress=kill, **options)
    assert len(read(killed)) == 4 and not llm.driver.stats.running
    torn = torn.replace(b"%b", QUESTIONS[4].encode())
    killed.write_bytes(killed.read_bytes() + torn)
    asked: list[int] = []
    submit = llm.submit
    monkeypatch.setattr(llm, "submit", lambda *a, **o: asked.append(1) or submit(*a, **o))
    assert answer_file(llm, source, killed, **options) == len(asked) == 5
    assert read(killed) == read(whole)
    assert answer_file(llm, source, killed, **options) == 0


def test_a_cut_answer_does_not_end_in_training(llm: LLM, tmp_path: Path) -> None:
    target = tmp_path / "data.jsonl"
    answer_file(llm, prompts(tmp_path / "prompts"), target, max_tokens=8)
    assert all(record["finish_reason"] == "length" for record in read(target))
    tokenizer = load_tokenizer(ZOO_FOLDER / "vocabulary")
    example = Examples(Data(path=str(target)), tokenizer)[0]
    assert not example.ended and len(example.response) == 8


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "[" * 100_000,
        '{"prompt": 1' + "0" * 5000 + "}",
        '{"text": "x"}',
        '{"prompt": ""}',
        '{"prompt": 5}',
        '{"prompt": "half \\ud83d"}',
        '{"messages": []}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": [{"role": "system", "content": null}, {"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": ["x"]}]}',
    ],
    ids=lambda line: line[:30],
)
def test_a_bad_line_is_named_before_any_work(llm: LLM, tmp_path: Path, line: str) -> None:
    source = tmp_path / "prompts"
    source.write_text('{"prompt": "x"}\n' + line + '\n{"prompt": "y"}\n')
    with pytest.raises(ValueError, match="prompts:2"):
        answer_file(llm, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_answers_to_other_prompts_are_refused(llm: LLM, tmp_path: Path) -> None:
    source, target = prompts(tmp_path / "prompts"), tmp_path / "out"
    for record in (
        {"line": 2, "prompt": "other"},
        {"prompt": QUESTIONS[0]},
        {"line": 1, "messages": 5},
        {"line": 1},
        {"line": True, "prompt": QUESTIONS[0]},
    ):
        write(target, {"response": "x", **record})
        with pytest.raises(ValueError, match="out:1"):
            answer_file(llm, source, target)
    with pytest.raises(ValueError, match="output"):
        answer_file(llm, source, source)
    with pytest.raises(ValueError, match="none"):
        answer_file(llm, tmp_path / "none", tmp_path / "new")
    with refuses("batch"):
        answer_file(llm, source, tmp_path / "new", batch=0)


@pytest.mark.parametrize(
    "held",
    [
        b"first line\nsecond",
        b"a text of one line",
        b'{"line": 1, "prompt": "other", "response": "x"}',
        b'{"line": 1, "prompt": "other", "response": "x"}\n{"line": 2',
        b"\xff\xfe",
        b"\n\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_foreign_file_is_refused_as_it_stands(llm: LLM, tmp_path: Path, held: bytes) -> None:
    source, target = prompts(tmp_path / "prompts"), tmp_path / "out"
    target.write_bytes(held)
    with pytest.raises(ValueError, match="out"):
        answer_file(llm, source, target)
    assert target.read_bytes() == held


def test_a_full_disk_loses_and_doubles_nothing(llm: LLM, tmp_path: Path) -> None:
    source, whole, full = (tmp_path / name for name in ("prompts", "whole", "full"))
    answer_file(llm, prompts(source), whole, max_tokens=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.stat().st_size // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large: .*full"):
            answer_file(llm, source, full, max_tokens=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.stat().st_size == whole.stat().st_size // 2 and not llm.driver.stats.running
    answer_file(llm, source, full, max_tokens=8)
    assert read(full) == read(whole)
