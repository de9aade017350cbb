"""The command `report`, which compares runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from outpace.cli.draw import console, replace_file

if TYPE_CHECKING:
    from outpace.lab.compare import ResultRecord


def report(
    files: Annotated[list[Path], Argument(help="Files written by evaluate --json.")],
    png: Annotated[Path | None, Option(help="Plot accuracy against speed to this file.")] = None,
) -> None:
    """Compare runs: figures, the Pareto front, and differences from the first run.

    A difference is significant if its 95 % interval (paired bootstrap over the questions) excludes
    zero.
    """
    from outpace.lab.compare import read_results, result_title

    if png is not None:
        from outpace.lab.plots import draw_front
    with replace_file(png) as picture:
        results = read_results(files)
        if not results:
            raise ValueError("the files contain no results to report")
        for number, result in enumerate(results, 1):
            console.print(f"{number}  {result['task']}: {result_title(result)}")
        console.print(comparison_table(results))
        show_truncated(results)
        if len(results) > 1:
            console.print(differences_table(results))
        if picture is not None:
            draw_front(results, picture)


def comparison_table(results: Sequence[ResultRecord]) -> Table:
    """Build a table with a line per run; a star marks the Pareto front."""
    from outpace.lab.compare import pareto_indices

    table = Table(header_style="bold")
    for name in COMPARISON_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    best = pareto_indices(results)
    for number, result in enumerate(results):
        table.add_row(f"{number + 1}{' ★' * (number in best)}", *result_cells(result))
    return table


COMPARISON_COLUMNS = (
    "run",
    "accuracy\n95 %",
    "tokens\nper\nforward",
    "tokens\nper\nsecond",
    "p50 s\np95 s",
    "first\ntext s",
    "accepted",
    "p_cache",
)


def result_cells(result: ResultRecord) -> list[str]:
    error, cached = result["tokens_per_forward_error"], result["p_cache"]
    scored = result["accuracy"] is not None
    low, high = result["interval"] or (0, 0)
    return [
        f"{result['accuracy']:.1%}\n{low:.1%}–{high:.1%}" if scored else "—",
        f"{result['tokens_per_forward']:.2f}" + ("" if error is None else f"\n± {error:.2f}"),
        f"{result['tokens_per_second']:.0f}",
        f"{result['latency']['p50']:.3f}\n{result['latency']['p95']:.3f}",
        f"{result['first_text']['p50']:.3f}",
        f"{result['acceptance_length']:.2f}",
        "—" if cached is None else f"{cached:.2f}",
    ]


def differences_table(results: Sequence[ResultRecord]) -> Table:
    from outpace.lab.compare import bootstrap_differences

    first, *others = results
    table = Table(title="against run 1", header_style="bold")
    for name in ("run", "figure", "difference", "95 %", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, other in enumerate(others, 2):
        for figure, d in bootstrap_differences(first, other).items():
            interval = f"{d.low:+.3f} … {d.high:+.3f}"
            p = "< 0.001" if d.p < 0.001 else f"{d.p:.3f}"  # limited by the number of draws
            table.add_row(str(number), figure, f"{d.value:+.3f}", interval, p)
    return table


def show_truncated(results: Sequence[Mapping[str, Any]]) -> None:
    """Print how many answers of each JSON result `max_tokens` has truncated."""
    for number, result in enumerate(results, 1):
        if count := result.get("unfinished"):
            run = f"run {number}: " if len(results) > 1 else ""
            at = result.get("cut_at")
            length = "" if at is None else f" at {at} tokens"
            text = f"{run}{count} of {result['problems']} answers were truncated{length}"
            effect = "" if result["accuracy"] is None else " and scored as they are"
            console.print(f"{text}{effect}: increase --max-tokens", style="bold", soft_wrap=True)
