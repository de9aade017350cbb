"""Measured figures as a page of Markdown: which claims hold, and all results."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.lab.compare import ResultRecord, bootstrap_interval, result_title
from outpace.lab.reproduce.figure import PAPERS, SCALES, Figure, Scale, figures
from outpace.lab.reproduce.verdict import HOLDS, SMALL, UNTESTED, describe

Written = Mapping[str, Any]
"""Content of the JSON file of a figure."""

FEWEST = 24
"""Problems from which a figure of a published model decides a claim."""


def page(folder: Path) -> str:
    """Return all figures of a folder, in the order of the papers.

    It has an overview, a table of claims per paper, and a section per figure. The overview marks
    claims that hold for another reason with a star, and undecided ones with a question mark. It
    also lists files that cannot be read.
    """
    rows, claims, sections = [], [], []
    for paper in PAPERS:
        judged: list[list[str]] = []
        for figure, scale, plan in ((f, s, p) for f in figures(paper) for s, p in plans_of(f)):
            stem = figure.file(scale, plan)
            for path in sorted(folder.glob(f"{stem}*.json")):
                task = plan.task if len(figure.scales[scale]) > 1 else ""
                other = path.stem.removeprefix(stem).strip("-")
                where = ", ".join(filter(None, (scale, task, other)))
                row, found, text = read(path, where)
                rows.append([f"{paper}:{figure.name}", where, *row])
                judged += found
                sections += text
        claims.append(table(("figure", "claim", "here", "measured", "in the paper"), judged))
    columns = ("figure", "scale", "claims that hold", "CPU minutes")
    head = table(columns, rows)
    return "\n\n".join([head, *claims, *sections]) + "\n"


def plans_of(figure: Figure) -> Iterator[tuple[str, Scale]]:
    """Return the scales of a figure with what is measured at each."""
    return ((scale, plan) for scale in SCALES for plan in figure.scales.get(scale, ()))


def read(path: Path, where: str) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the rest of a file's row in the overview, its claims and its section.

    There are neither claims nor a section of a file that cannot be read.
    """
    try:
        written = json.loads(path.read_bytes())
        claims, first = written["claims"], written["results"][0]
        held = [claim for claim in claims if claim["verdict"] == HOLDS]
        others = sum(bool(claim["note"]) for claim in held)
        undecided = sum(claim["verdict"] in (SMALL, UNTESTED) for claim in claims)
        marks = [f"{others}\\*"] * bool(others) + [f"{undecided}?"] * bool(undecided)
        share = f"{len(held)} of {len(claims)}" + (f" ({', '.join(marks)})" if marks else "")
        row = [share, minutes(written)]
        few = (
            f", below {FEWEST}"
            if first["task"] and "small" in where and first["problems"] < FEWEST
            else ""
        )
        label = f"[{written['figure']}]({path.name}) {where}, n = {first['problems']}{few}"
        return row, [[label, *claimed(claim)] for claim in claims], [section(written)]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return [f"{path.name} is of another version: measure it again", ""], [], []


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
    words = describe(claim["verdict"], claim["note"])
    words = words if words == HOLDS else f"**{words}**"
    return [claim["claim"], words, claim["finding"], claim["paper"] or "–"]


def measured(result: ResultRecord) -> list[str]:
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
        figure_words(result, "acceptance_length") + paper.get("acceptance_length", ""),
        f"{result[name]:.0f}",
        faster_words(faster) + paper.get("speedup", "") if faster else "",
        *([figure_words(result, "likelihood")] if "likelihood" in result else []),
    ]


def figure_words(result: ResultRecord, key: str) -> str:
    """Return a figure with its interval, where answers have it."""
    stem = key.partition("_")[0]
    words = f"{result[key]:.2f}"
    if stem not in result["samples"]:
        return words
    low, high = bootstrap_interval(result, key)
    to = "–" if low >= 0 else "…"  # not beside a minus
    return f"{words}, {low:.2f}{to}{high:.2f}"


def faster_words(faster: Mapping[str, Any]) -> str:
    interval = ", {:.2f}–{:.2f}".format(*faster["interval"]) if faster["interval"] else ""
    return f"{faster['ratio']:.2f} ×{interval}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
