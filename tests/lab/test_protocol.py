"""Evaluation protocols: files and prompts."""

import json
from pathlib import Path

import pytest

from outpace.lab.protocol import PROTOCOLS, find_setting, load_settings
from outpace.lab.tasks import TASKS
from outpace.methods import D2F, LeftToRight, WeDLM

GSM8K = [
    {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"}
    for n in range(9)
]
FIGURES = {
    *("accuracy", "tokens_per_second", "tokens_per_forward", "latency", "answer_tokens"),
    *("speedup", "acceptance_length"),
}
PLACES = {"place", "method"}
OPTIONS = {"batch", "tokens", "lookahead", "window", "ratio", "activate", "confidence", "add"} | {
    "entropy",
    "penalty",
    "block",
    "layers",
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in GSM8K))
    return str(path)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_are_complete(name: str) -> None:
    found = load_settings(name)
    assert len({(each.task, each.name) for each in found}) == len(found)
    for each in found:
        assert each.template is not None or each.harness is not None
        assert each.task in TASKS or each.template is None
        method = each.build_method()
        assert (method is None) is (name in ("plain", "qwen"))
        assert bool(each.published) is (name != "plain") and bool(each.model) is (name != "plain")
        for figure in each.published:
            assert "place" in figure and set(figure) & FIGURES
            assert set(figure) <= FIGURES | PLACES | OPTIONS
            assert all(v > 0 for key, v in figure.items() if key not in PLACES)
            assert 0 < figure.get("accuracy", 1) <= 100


def test_methods_have_the_settings_of_their_papers() -> None:
    assert find_setting("gsm8k", "d2f:llada").build_method() == D2F(
        block=64, add=0.7, activate=0.95, confidence=0.9
    )
    assert find_setting("gsm8k", "wedlm:quality").build_method() == WeDLM(
        window=6, entropy=None, penalty=0.1
    )
    assert find_setting("gsm8k", "apd:left-to-right").build_method() == LeftToRight(tokens=1)


def test_shots_may_be_turns_of_a_conversation(data: str) -> None:
    (question,) = find_setting("gsm8k", "d2f:llada").load_questions(data, 1, data)
    roles = [message["role"] for message in question.prompt]  # type: ignore[index]
    assert roles == ["user", "assistant"] * 4 + ["user"]
    assert question.prompt[1]["content"] == " 0 + 1 = 1\n#### 1"  # type: ignore[index]


def test_held_out_shots_are_not_questions(tmp_path: Path) -> None:
    path = tmp_path / "cd4.jsonl"
    lines = [{"input": f"{n},2,3,4,9", "output": f"{n}+2=1"} for n in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = find_setting("countdown").load_questions(str(path), 5, None)
    assert [question.reference for question in questions] == ["8,2,3,4,9", "9,2,3,4,9"]
    text = str(questions[0].prompt)
    assert text.startswith("Given 5 numbers") and text.endswith("\n\nInput: 8,2,3,4,9\nOutput: ")
    assert "\n\nInput: 7,2,3,4,9\nOutput: 7+2=1\n\n" in text
    path.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match="shots"):
        find_setting("countdown").load_questions(str(path), 5, None)


def test_published_puzzle_as_sheet(tmp_path: Path) -> None:
    path = tmp_path / "sudoku.jsonl"
    board = "4000\n3104\n1030\n0000"
    path.write_text(json.dumps({"input": board, "output": "4213\n3124\n1432\n2341"}) + "\n")
    puzzle = find_setting("sudoku", "plain:puzzle")
    (question,) = puzzle.load_questions(str(path), 1, None)
    assert (question.prompt, question.reference, puzzle.raw) == (f"Solve:\n{board}", board, False)
    (made, *_) = find_setting("sudoku-sheet").load_questions(None, 3, None)
    assert made.prompt == f"Solve:\n{made.reference}"
    assert find_setting("sudoku").shots == 8


def test_missing_and_unnecessary_shots_are_rejected(data: str) -> None:
    for task, protocol, given in (
        ("gsm8k", "d2f:dream", None),
        ("gsm8k", "plain", data),
        ("countdown", "plain", data),
    ):
        with pytest.raises(ValueError, match="shots"):
            find_setting(task, protocol).load_questions(data, 1, given)
    Path(data).write_text(json.dumps(GSM8K[0]) + "\n")
    with pytest.raises(ValueError, match="shots"):
        find_setting("gsm8k", "d2f:dream").load_questions(data, 1, data)


def test_options_override_the_paper() -> None:
    found = find_setting("gsm8k", "d2f:dream")
    options = found.request_options({"max_tokens": 7, "temperature": None})
    assert options["max_tokens"] == 7 and options["temperature"] == 0.0 and options["raw"] is True
    assert options["stop"] == ("Q:", "</s>", "<|im_end|>")
    assert isinstance(options["method"], D2F)
    chosen = found.request_options({"method": LeftToRight()})
    assert chosen["method"] == LeftToRight() and chosen["template"] == {}
    drafted = find_setting("math500", "dflash:8b").request_options({})
    assert drafted["template"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("task", "protocol", "valid"),
    [
        ("nonsense", "plain", "gsm8k"),
        ("gsm8k", "nonsense", "dflash"),
        ("gsm8k", "d2f", "d2f:llada"),
        ("gsm8k", "d2f:nonsense", "d2f:dream"),
        ("gsm8k", "plain:x", "plain$"),
        ("sudoku", "d2f", "humaneval"),
    ],
)
def test_unknown_names_list_the_valid_ones(task: str, protocol: str, valid: str) -> None:
    with pytest.raises(ValueError, match=valid):
        find_setting(task, protocol)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[tasks", "mine.toml"),
        ("title = 'x'", "tasks"),
        ("[tasks.gsm8k]\nshoots = 3", "shoots"),
        ("[tasks.gsm8k]\nscore = 'nonsense'", "nonsense"),
        ("[tasks.other]\ntemplate = 'x'", "other"),
        ("[tasks.gsm8k]\nraw = true\nsystem = 'x'", "system"),
        ("[tasks.gsm8k]\ntemplate = 'x'\nshots = 3", "shot"),
        ("[tasks.gsm8k]\ntemplate = '{answr}'\nscore = 'strict'", "answr"),
        ("[tasks.gsm8k]\ntemplate = 'x'\nmax_tokens = 0", "max_tokens"),
        ("[tasks.gsm8k]\ntemplate = 'x'\ncanvas = 0", "canvas"),
    ],
)
def test_invalid_protocols_are_rejected(tmp_path: Path, data: str, text: str, name: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=name):
        find_setting("gsm8k", str(path)).load_questions(data, 1, None)
