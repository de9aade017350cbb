"""Measured figures as a page of Markdown."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outpace.lab.reproduce.figure import PAPERS, Figure, Scale, figures
from outpace.lab.reproduce.page import measured, page, plans_of
from outpace.lab.reproduce.verdict import FAILS, HOLDS, SMALL, VERDICTS, judge_figure

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
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
    "samples": {"right": [True], "tokens": [62], "forwards": [63]},
}
CLAIM = {"claim": "faster", "verdict": HOLDS, "finding": "1 → 2", "paper": "10 → 20", "note": ""}


def write(folder: Path, name: str, **change: Any) -> None:
    """A figure of two claims and two results."""
    paper, figure, scale = name.split("-")
    other = {
        **RESULT,
        "accuracy": None,
        "interval": None,
        "faster": {"ratio": 2.0, "interval": [1.9, 2.2]},
    }
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
        "claims": [CLAIM, {**CLAIM, "verdict": FAILS, "paper": ""}],
        "results": [RESULT, other],
    }
    (folder / f"{name}.json").write_text(json.dumps(written | change))


def test_a_page_counts_claims_and_lists_results(tmp_path: Path) -> None:
    write(tmp_path, "wedlm-entropy-mini")
    noted = [{**CLAIM, "verdict": verdict, "note": "a reason"} for verdict in VERDICTS[:2]]
    write(tmp_path, "apd-figure3-mini", claims=[*noted, {**CLAIM, "verdict": SMALL}])
    (tmp_path / "other.json").write_text("{")
    text = page(tmp_path)
    head, *_ = text.split("\n\n")
    rows = ("| apd:figure3 | mini | 1 of 3 (1\\*, 1?) | 3.0 |",)
    rows += ("| wedlm:entropy | mini | 1 of 2 | 3.0 |",)
    assert head.endswith("\n".join(rows))
    assert text.count("| faster | holds | 1 → 2 | 10 → 20 |") == 2  # the paper's table, the section
    name = "[apd:figure3](apd-figure3-mini.json) mini, n = 100"
    assert f"| {name} | faster | **holds for another reason: a reason** | 1 → 2 | 10" in text
    assert "| faster | **does not hold: a reason** | 1 → 2 | 10 → 20 |" in text
    assert "| faster | **does not hold** | 1 → 2 | – |" in text
    assert "| tiny-ar autoregressive | 99.0 %, 94.5–99.8 | 0.98 | 1.00 | 500 |  |" in text
    assert (
        "| tiny-ar autoregressive a=1 | – | 0.98 ± 0.01 | 1.00 | 500 | 2.00 ×, 1.90–2.20 |" in text
    )
    assert text.count("\n\nThe ratio R.\n\n") == text.count("## ") == 2
    assert "revision 0.1.0: `outpace reproduce apd`" in text


def test_a_page_has_each_run_of_a_figure_and_marks_few_problems(tmp_path: Path) -> None:
    write(tmp_path, "dflash-table1-small")
    stored = tmp_path / "dflash-table1-small.json"
    for name, problems in (("gsm8k", 8), ("gsm8k-other-model", 24)):
        written = json.loads(stored.read_text())
        written["results"][0]["problems"] = problems
        (tmp_path / f"dflash-table1-small-{name}.json").write_text(json.dumps(written))
    text = page(tmp_path)
    assert text.count("small, gsm8k, n = 8, below 24 |") == 2
    assert text.count("small, gsm8k, other-model, n = 24 |") == 2
    assert text.count("| dflash:table1 | small, gsm8k, other-model | 1 of 2 |") == 1


def stored_figures() -> Iterator[tuple[Figure, str, Scale, Path]]:
    for paper in PAPERS:
        for figure in figures(paper):
            for scale, plan in plans_of(figure):
                for path in sorted(RESULTS.glob(f"{figure.file(scale, plan)}*.json")):
                    yield figure, scale, plan, path


@pytest.mark.parametrize("paper", PAPERS)
def test_stored_claims_are_judged_by_the_rules_of_today(paper: str) -> None:
    stored = [each for each in stored_figures() if each[0].paper == paper]
    assert len(stored) > 8
    for figure, scale, plan, path in stored:
        written = json.loads(path.read_bytes())
        judged = [asdict(verdict) for verdict in judge_figure(figure, scale, plan, written)]
        assert written["claims"] == judged, path.name


def test_the_documentation_has_the_stored_results() -> None:
    made = page(RESULTS)
    assert made.count("## ") >= 10
    overview, *tables = made.split("\n\n")[: 1 + len(PAPERS)]
    assert overview in (ROOT / "docs" / "reproduced.md").read_text()
    claims = (RESULTS / "claims.md").read_text()
    assert all(table in claims for table in tables)
    for line in overview.splitlines()[2:]:
        name, scale, share, *_ = (cell.strip() for cell in line.split("|")[1:-1])
        if scale == "mini":
            assert f"(`{name}`) | {share} |" in claims


NUMBER = re.compile(r"(?<![\w.=§−-])(\d[\d,]*(?:\.\d+)?)(?!\w)( %| points| times|×)?")
COUNT = re.compile(
    r"n = ([\d,]+)|([\d,]+|six|eight)(?: held-out)? (?:problems|prompts|questions|rounds|answers)\b"
)
WORDS = {"six": "6", "eight": "8"}
RATIOS = ("tokens_per_forward", "acceptance_length", "tokens_per_cpu_second", "tokens_per_second")
APART = ("samples", "provenance", "claims", "accepted_tokens", "questions")


def quoted(text: str) -> Iterator[tuple[float, int, str]]:
    """Yield the measured numbers and counts of a text, with decimals and units: no options."""
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)|[RWM] = [\d.]+|95 %", "", text)
    for number, unit in NUMBER.findall(plain):
        if "." in number or unit:
            yield float(number.replace(",", "")), len(number.partition(".")[2]), unit
    for found in COUNT.finditer(plain):
        number = next(filter(None, found.groups()))
        yield float(WORDS.get(number, number).replace(",", "")), 9, ""  # exactly


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from () if key in APART else numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield float(value)


def known(path: Path) -> set[float]:
    """Return the numbers of a file, and the ratios and differences of its results and points."""
    written = json.loads(path.read_bytes())
    found = set(numbers(written))
    for points in (written.get("results", []), written.get("published", [])):
        for a, b in product(points, points):
            pairs = [(a.get(key), b.get(key)) for key in RATIOS]
            pairs += [(a.get("accuracy"), b.get("accuracy"))]
            found |= {x / y for x, y in pairs[:-1] if x and y}
            found |= {x - y for x, y in pairs[-1:] if x and y}
    drafts = [
        each["ms_per_pass"]["draft"]["p50"]
        for each in written.get("results", ())
        if "draft" in each.get("ms_per_pass", ())
    ]
    found |= {x / y for x, y in product(drafts, drafts)}
    findings = " ".join(claim["finding"] for claim in written.get("claims", ()))
    return found | {float(number) for number in re.findall(r"\d+\.?\d*", findings)}


def unknown(text: str, values: set[float]) -> list[float]:
    """Return the measured numbers of a text that no value rounds to, also in percent."""
    return [
        number
        for number, places, unit in quoted(text)
        if not any(
            round(value * size, places) == number
            for value in values
            for size in ((1, 100) if unit in (" %", " points") else (1,))
        )
    ]


def files_of(text: str, folder: Path) -> list[Path]:
    """Return the stored files that a text links, or whose figures it names."""
    named = [f"{paper}-{figure}-mini.json" for paper, figure in re.findall(r"`(\w+):(\w+)`", text)]
    paths = [RESULTS / name for name in named]
    paths += [folder / link for link in re.findall(r"\]\(([^)#]*\.json)\)", text)]
    return [path for path in paths if path.is_file()]


def test_numbers_of_the_statements_are_those_of_the_stored_results() -> None:
    checked = 0
    for line in (RESULTS / "claims.md").read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if not line.startswith("| ") or len(cells) != 3:
            continue
        reason = " ".join(cells[1:])
        values = set().union(*map(known, files_of(line, RESULTS)))
        assert not values or not unknown(reason, values), (unknown(reason, values), line)
        assert values or not [*quoted(reason)], line
        checked += bool([*quoted(reason)])
    assert checked > 20
    assert unknown("2.5 times as fast, 40 %", {2.46, 0.404, 39.4}) == []
    assert unknown("2.5 times as fast, 40 %", {2.56, 0.406, 39.4}) == [2.5, 40]
    assert unknown("n = 100, on eight problems, 3,944 answers", {100, 8.2}) == [8, 3944]


def test_numbers_of_real_text_are_those_of_the_stored_results() -> None:
    path = ROOT / "docs" / "real-text.md"
    text = path.read_text()
    files = [*files_of(text, path.parent), RESULTS / "real-text-training.json"]
    assert len(files) > 10
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "outpace")))
    assert not unknown(prose, set().union(*map(known, files))) and len([*quoted(prose)]) > 20
    cells = {
        cell.partition(" (paper")[0].replace(" ×", "").replace(" ± ", "±").replace("-", "−")
        for file in files[:-1]
        for result in json.loads(file.read_bytes())["results"]
        if "tokens" in result.get("samples", ())
        for cell in measured(result)[1:]
    }
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    rows += [line for line in text.splitlines() if line.startswith(("| EAGLE", "| DFlash"))]
    assert len(rows) == 47
    for row in rows:
        assert {*row.strip("| ").split(" | ")[1:]} <= cells | {"1"}, row


def test_acceptance_after_earlier_turns_is_that_of_the_stored_results() -> None:
    results = json.loads((RESULTS / "draft-turns.json").read_bytes())["results"]
    text = (ROOT / "docs" / "real-text.md").read_text()
    for context in {each["context"] for each in results}:
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {context:,} | "))
        here = [each for each in results if each["context"] == context]
        stored = {f"{value:.2f}" for value in numbers(here)}
        assert {*row.strip("| ").split(" | ")[1:]} <= stored, row
        assert all(each["equal"] for each in here)


def test_numbers_of_the_readme_are_those_of_the_stored_results() -> None:
    text = (ROOT / "README.md").read_text()
    files = [RESULTS / name for name in ("everyday-servers.json", "methods.json")]
    shown = "\n".join(line for line in text.splitlines() if line[:2] == "| " or "×" in line)
    assert not unknown(shown, set().union(*map(known, files))) and len([*quoted(shown)]) > 18


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, "apd-figure3-mini")
    for name, text in (("apd-figure2", "{"), ("apd-figure4", "[]"), ("d2f-table3", "[" * 9**5)):
        (tmp_path / f"{name}-mini.json").write_text(text)
    write(tmp_path, "apd-figure5-mini", claims=[{"claim": "old"}])
    write(tmp_path, "apd-figure6-mini", results=[])
    text = page(tmp_path)
    assert text.count("## ") == 1 and "## apd:figure3" in text
