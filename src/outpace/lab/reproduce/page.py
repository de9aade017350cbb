"""Measured figures as a page of Markdown: which claims hold, and all results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.lab.compare import result_title
from outpace.lab.reproduce.figure import PAPERS, SCALES, figures
from outpace.lab.reproduce.verdict import holding

Written = Mapping[str, Any]
"""Content of the JSON file of a figure."""


def page(folder: Path) -> str:
    """Return all figures of a folder, in the order of the papers: an overview and their sections.

    The overview also lists files that cannot be read.
    """
    rows, sections = [], []
    for figure in (figure for paper in PAPERS for figure in figures(paper)):
        for scale, plan in ((s, p) for s in SCALES for p in figure.scales.get(s, ())):
            path = folder / f"{figure.file(scale, plan)}.json"
            if path.is_file():
                row, text = read(path)
                name = f"{scale}, {plan.task}" if len(figure.scales[scale]) > 1 else scale
                rows.append([f"{figure.paper}:{figure.name}", name, *row])
                sections += text
    head = table(("figure", "scale", "claims that hold", "CPU minutes"), rows)
    return "\n\n".join([head, *sections]) + "\n"


def read(path: Path) -> tuple[list[str], list[str]]:
    """Return the rest of a file's row in the overview, and its section if it can be read."""
    try:
        written = json.loads(path.read_bytes())
        claims = written["claims"]
        share = f"{sum(claim['holds'] for claim in claims)} of {len(claims)}"
        return [share, minutes(written)], [section(written)]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return [f"{path.name} is of another version: measure it again", ""], []


def minutes(written: Written) -> str:
    return f"{sum(result['cpu_seconds'] for result in written['results']) / 60:.1f}"


def section(written: Written) -> str:
    results, about = written["results"], written["about"]
    speed = "CPU second" if results[0]["clock"] == "cpu" else "second"
    columns = ("setting", "accuracy, 95 %", "tokens per forward", "acceptance length")
    made = written["provenance"]
    trained = written.get("trained", {}).items()
    models = "\n".join(f"- `{name}`: `outpace train {words}`" for name, words in trained)
    judged = ("log-likelihood",) if "likelihood" in results[0] else ()
    parts = [
        f"## {written['figure']}",
        f"{about[:1].upper()}{about[1:]}.",
        table(("claim", "here", "measured", "in the paper"), map(claimed, written["claims"])),
        table((*columns, f"tokens per {speed}", "over the first", *judged), map(measured, results)),
        models,
        f"{results[0]['problems']} problems of {results[0]['task']}, scale {written['scale']}, "
        f"{minutes(written)} minutes of CPU time, on {made['processor']}, revision "
        f"{made['revision'] or made['outpace']}: `{shlex.join(made['command'])}`",
    ]
    return "\n\n".join(filter(None, parts))


def claimed(claim: Mapping[str, Any]) -> list[str]:
    holds = holding(claim["holds"], claim.get("note", ""))
    holds = holds if holds == "holds" else f"**{holds}**"
    return [claim["claim"], holds, claim["finding"], claim["paper"] or "–"]


def measured(result: dict[str, Any]) -> list[str]:
    error, faster = result["tokens_per_forward_error"], result["faster"]
    paper = {key: f" (paper {value:.2f})" for key, value in result.get("paper", {}).items()}
    right = "–"
    if result["accuracy"] is not None:
        low, high = (100 * bound for bound in result["interval"])
        right = f"{100 * result['accuracy']:.1f} %, {low:.1f}–{high:.1f}"
    name = "tokens_per_cpu_second" if result["clock"] == "cpu" else "tokens_per_second"
    return [
        result_title(result),
        right,
        f"{result['tokens_per_forward']:.2f}" + ("" if error is None else f" ± {error:.2f}"),
        f"{result['acceptance_length']:.2f}" + paper.get("acceptance_length", ""),
        f"{result[name]:.0f}",
        "" if faster is None else f"{faster['ratio']:.2f} ×" + paper.get("speedup", ""),
        *([f"{result['likelihood']:.2f}"] if "likelihood" in result else []),
    ]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
