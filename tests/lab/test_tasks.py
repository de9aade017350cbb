"""Lines of published files, and the errors of invalid ones."""

import gzip
import json
from pathlib import Path

import pytest

from outpace.lab.run import questions_of
from outpace.lab.scoring import NEEDED
from outpace.lab.tasks import TASKS

LINES = {
    "countdown": {"input": "15,44,79,50", "output": "44-15=29,79-29=50"},
    "gsm8k": {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"},
    "humaneval": {"prompt": "def f():\n", "test": "def check(f): ...", "entry_point": "f"},
    "math500": {"problem": "1 + 1?", "solution": "It is $\\boxed{2}$.", "answer": "2"},
    "mbpp": {"text": "Write f.", "code": "def f(): ...", "test_list": ["assert f() is None"]},
    "mtbench": {"turns": ["Write.", "Again."]},
    "own-exact": {"question": "What is 3 + 4?", "answer": "7"},
    "own-number": {"question": "What is 3 + 4?", "answer": "It is 7."},
    "own-regex": {"question": "What is 3 + 4?", "answer": r"\b7\b"},
    "prose": {"prompt": "Write."},
    "records": {"prompt": "Return JSON."},
    "sudoku": {"input": "4000\n3104\n1030\n0000", "output": "4213\n3124\n1432\n2341"},
}
MADE = {"story", "story-unseen", "sudoku-sheet", "table"}


def file_of(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(autouse=True)
def judged_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks for sandbox and libraries."""
    for rule in NEEDED:
        monkeypatch.setitem(NEEDED, rule, lambda: None)


@pytest.mark.parametrize("task", LINES)
def test_valid_line_becomes_a_question(tmp_path: Path, task: str) -> None:
    path = file_of(tmp_path / "data.jsonl", *[LINES[task]] * 10)
    question = questions_of(task, 1, path)[0]
    first = next(iter(LINES[task].values()))
    asked = first[0] if isinstance(first, list) else first
    assert isinstance(question.prompt, str) and asked in question.prompt


def test_the_sanitized_problems_have_a_prompt(tmp_path: Path) -> None:
    line = {"prompt" if name == "text" else name: value for name, value in LINES["mbpp"].items()}
    (question,) = questions_of("mbpp", 1, file_of(tmp_path / "data.jsonl", line))
    assert "Write f." in str(question.prompt)


@pytest.mark.parametrize("task", LINES)
def test_a_missing_field_is_named(tmp_path: Path, task: str) -> None:
    for field in TASKS[task].texts + TASKS[task].lists:  # type: ignore[attr-defined]
        for wrong in (None, "", 7, []):
            bad = {**LINES[task], field: wrong}
            path = file_of(tmp_path / "data.jsonl", *[LINES[task]] * 9, bad)
            with pytest.raises(ValueError, match=f"data.jsonl:10: {field}"):
                questions_of(task, 50, path)
            assert len(questions_of(task, 1, path)) == 1


@pytest.mark.parametrize(
    "line", ["{", "5", "[" * 100_000, '{"question": "?", "answer": "7"}'], ids=range(4)
)
def test_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(LINES['gsm8k'])}\n{line}\n")
    with pytest.raises(ValueError, match="data.jsonl:2"):
        questions_of("gsm8k", 9, str(path))


def test_a_file_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(LINES["gsm8k"]).encode()))
    assert len(questions_of("gsm8k", 9, str(path))) == 1
    for broken in (b"no gzip", path.read_bytes()[:-9]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="data.jsonl.gz"):
            questions_of("gsm8k", 9, str(path))


def test_prompts_of_the_package_need_no_file() -> None:
    for task in ("prose", "records"):
        questions = questions_of(task, 100)
        assert len(questions) >= 10 and all(q.judge_answer("") is None for q in questions)


def test_generated_answers_are_correct() -> None:
    for task in MADE:
        for question, line in zip(
            questions_of(task, 20), TASKS[task].load_lines(None, 20), strict=True
        ):
            assert question.judge_answer(line["answer"]) is True
            assert question.judge_answer("no") is False


@pytest.mark.parametrize(
    ("judge", "answer", "right", "wrong"),
    [
        ("exact", " 7 ", ["7", "7\n"], ["7.", "It is 7", ""]),
        ("number", "#### 1,007", ["It is 1007.0", "1 + 1006 = 1,007"], ["7", "", "seven"]),
        ("regex", "^(yes|no)$", ["yes"], ["yes and no", ""]),
    ],
)
def test_own_lines_are_judged(
    tmp_path: Path, judge: str, answer: str, right: list[str], wrong: list[str]
) -> None:
    path = file_of(tmp_path / "mine.jsonl", {"question": "?", "answer": answer})
    (question,) = questions_of(f"own-{judge}", 9, path)
    assert all(question.judge_answer(text) for text in right)
    assert not any(question.judge_answer(text) for text in wrong)


@pytest.mark.parametrize(
    ("judge", "answer"),
    [("exact", "  "), ("number", "seven"), ("regex", "("), ("regex", "a{99999999999}")],
)
def test_invalid_references_are_named(tmp_path: Path, judge: str, answer: str) -> None:
    lines = [{"question": "?", "answer": text} for text in ("7", answer)]
    with pytest.raises(ValueError, match="mine.jsonl:2: answer"):
        questions_of(f"own-{judge}", 9, file_of(tmp_path / "mine.jsonl", *lines))
