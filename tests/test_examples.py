"""Examples run: programs, and the notebook."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from outpace import LLM
from outpace.data.generated.story import story_problems
from outpace.lab import run
from outpace.methods import Autoregressive
from shown import ROOT, is_right

AGENT = ROOT / "examples" / "agent.py"
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {AGENT})
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem == "evaluate"))
        for path in EXAMPLES
    ],
)
def test_example_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = run.questions_of
    monkeypatch.setattr(run, "questions_of", lambda task, limit: questions(task, min(limit, 2)))
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    assert is_right(path.read_text(), printed)


@pytest.mark.nightly
def test_agent_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from running import serving
    from toolbox import tool_model

    agent = runpy.run_path(str(AGENT))
    with serving("--model", f"m={tool_model('tiny-ar', 'tool_call')}") as process:
        agent["main"](["m", "--url", f"{process.url}/v1"])
    printed = capsys.readouterr().out
    assert all(f"> {question}\n" in printed for question in agent["QUESTIONS"])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_own_method_gives_the_text_of_one_token_per_forward(temperature: float) -> None:
    lookup = runpy.run_path(str(ROOT / "examples" / "own_method.py"))["PromptLookup"]
    stories = [problem.question for problem in story_problems("test", 3)]
    llm = LLM("tiny-aux")
    plain, fast = (
        llm.generate(stories, method=method, max_tokens=96, temperature=temperature, seed=1)
        for method in (Autoregressive(), lookup(match=1))
    )
    assert [output.ids for output in plain] == [output.ids for output in fast]
    assert sum(o.forwards for o in fast) < sum(o.forwards for o in plain)


def shown_by(notebook) -> tuple[str, str]:
    """Code of a notebook, and the text of what it shows."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = []
    for output in (output for cell in cells for output in cell.outputs):
        data = output.get("data", {})
        html = data.get("text/html", "").replace("</div>", "\n")
        texts += [output.get("text", ""), re.sub("<[^>]+>", "", html)]
        assert output.output_type != "error"
    return "".join(cell.source for cell in cells), "".join(texts)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # those of Jupyter's own packages
def test_notebook_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert is_right(*shown_by(notebook)) and NOTEBOOK.stat().st_size < 100_000
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    code, shown = shown_by(notebook)
    assert is_right(code, shown) and "tokens per forward" in shown
