"""The comparison of servers by the tools that they choose."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import tool_choice
from running import serving
from toolbox import tool_model


def test_questions_have_two_tools_and_one_answer() -> None:
    questions = [*tool_choice.read_questions()]
    assert len(questions) == len({each.text for each in questions}) == 50
    places = []
    for _, tools, expected in questions:
        names = [tool["function"]["name"] for tool in tools]
        assert len({*names}) == 2 and expected in (*names, "")
        places.append(names.index(expected) if expected else None)
        for tool in tools:
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
    assert [places.count(each) for each in (0, 1, None)] == [20, 20, 10]


@pytest.mark.parametrize(
    ("expected", "calls", "text", "right", "unparsed"),
    [
        ("a", ["a"], None, True, False),
        ("a", ["a", "a"], "First:", True, False),
        ("a", ["b"], None, False, False),
        ("a", ["a", "b"], None, False, False),
        ("a", [], '{"name": "a"}', False, True),
        ("a", [], "No.", False, False),
        ("", [], "Hello a", True, False),
        ("", ["a"], None, False, False),
    ],
)
def test_answers_are_judged(
    expected: str, calls: list[str], text: str | None, right: bool, unparsed: bool
) -> None:
    message: dict[str, Any] = {"content": text}
    if calls:
        message["tool_calls"] = [{"function": {"name": name}} for name in calls]
    row = tool_choice.judge("s", tool_choice.Question("q", [], expected), message)
    assert (row["right"], row["unparsed"]) == (right, unparsed)


@pytest.mark.nightly
def test_servers_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "a.json"
    with serving("--model", f"m={tool_model('tiny-ar', 'tool_call')}") as process:
        words = ["--server", f"a={process.url}", "--server", f"b={process.url}"]
        words += ["--limit", "3", "--tokens", "40", "--json", str(out)]
        monkeypatch.setattr("sys.argv", ["tool_choice.py", *words])
        tool_choice.main()
    written = json.loads(out.read_text())
    first, second = written["servers"]
    assert first | {"server": "b"} == second and first["questions"] == 3
    assert len(written["answers"]) == 6
    (bar,) = written["bars"]
    assert (bar["value"], bar["met"]) == (0, True)
