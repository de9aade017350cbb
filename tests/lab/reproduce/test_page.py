"""Measured figures as a page of Markdown."""

import json
import re
from pathlib import Path
from typing import Any

from outpace.lab.reproduce.page import page

ROOT = Path(__file__).parents[3]
RESULT: dict[str, Any] = {
    "task": "story",
    "problems": 100,
    "line": "tiny-ar autoregressive",
    "setting": "",
    "clock": "cpu",
    "accuracy": 0.99,
    "interval": [0.945, 0.998],
    "tokens_per_forward": 0.984,
    "tokens_per_forward_error": None,
    "acceptance_length": 1.0,
    "tokens_per_second": 300.0,
    "tokens_per_cpu_second": 500.4,
    "cpu_seconds": 90.0,
    "faster": None,
}
CLAIM = {"claim": "faster", "holds": True, "finding": "1 → 2", "paper": "10 → 20"}


def write(folder: Path, name: str, **change: Any) -> None:
    """A figure of two claims and two results."""
    paper, figure, scale = name.split("-")
    other = {**RESULT, "accuracy": None, "interval": None, "faster": {"ratio": 2.0}}
    other |= {"tokens_per_forward_error": 0.01, "setting": "a=1"}
    written = {
        "provenance": {
            "processor": "a CPU",
            "revision": None,
            "outpace": "0.1.0",
            "command": ["outpace", "reproduce", paper],
        },
        "figure": f"{paper}:{figure}",
        "about": "the ratio R",
        "scale": scale,
        "claims": [CLAIM, {**CLAIM, "holds": False, "paper": ""}],
        "results": [RESULT, other],
    }
    (folder / f"{name}.json").write_text(json.dumps(written | change))


def test_a_page_counts_claims_and_lists_results(tmp_path: Path) -> None:
    write(tmp_path, "wedlm-entropy-mini")
    noted = [{**CLAIM, "holds": holds, "note": "a reason"} for holds in (True, False)]
    write(tmp_path, "apd-figure3-mini", claims=noted)
    (tmp_path / "other.json").write_text("{")
    text = page(tmp_path)
    assert text.index("| apd:figure3 | mini | 1 of 2 | 3.0 |") < text.index("| wedlm:entropy |")
    assert "| faster | holds | 1 → 2 | 10 → 20 |" in text
    assert "| faster | **holds for another reason: a reason** | 1 → 2 | 10 → 20 |" in text
    assert text.count("a reason") == 1
    assert "| faster | **does not hold** | 1 → 2 | – |" in text
    assert "| tiny-ar autoregressive | 99.0 %, 94.5–99.8 | 0.98 | 1.00 | 500 |  |" in text
    assert "| tiny-ar autoregressive a=1 | – | 0.98 ± 0.01 | 1.00 | 500 | 2.00 × |" in text
    assert text.count("\n\nThe ratio R.\n\n") == text.count("## ") == 2
    assert "revision 0.1.0: `outpace reproduce apd`" in text


def test_the_documentation_has_the_stored_results() -> None:
    text = (ROOT / "docs" / "reproduced.md").read_text()
    made = page(ROOT / "benchmarks" / "results")
    assert made.count("## ") >= 10
    overview, *_ = made.split("\n\n")
    assert overview in text
    claims = (ROOT / "benchmarks" / "results" / "claims.md").read_text()
    rows = re.findall(r"^\| (\S+) \| mini \| (\d+ of \d+) ", overview, re.MULTILINE)
    for name, share in rows:
        assert f"(`{name}`) | {share} |" in claims


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, "apd-figure3-mini")
    for name, text in (("apd-figure2", "{"), ("apd-figure4", "[]"), ("d2f-table3", "[" * 9**5)):
        (tmp_path / f"{name}-mini.json").write_text(text)
    write(tmp_path, "apd-figure5-mini", claims=[{"claim": "old"}])
    write(tmp_path, "apd-figure6-mini", results=[])
    text = page(tmp_path)
    assert text.count("## ") == 1 and "## apd:figure3" in text
