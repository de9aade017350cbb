"""The command that draws the figures of papers again: `reproduce`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from outpace.benchmark.side import check_rounds
from outpace.benchmark.summary import SideFigures, summarise_sides
from outpace.cli.draw import console
from outpace.cli.flags import LOAD_FLAGS, LoadFlags
from outpace.cli.output import replace_file
from outpace.cli.sides import (
    LoadGrid,
    build_sides,
    create_shapes,
    print_names,
    results_table,
    run_rounds,
)
from outpace.cli.task_flags import TaskFlags
from outpace.cli.training import run_training
from outpace.errors import OptionError
from outpace.methods.bounds import check_at_least_one
from outpace.provenance import provenance_record
from reproduce.figure import SCALES, Figure, Scale, figure_names, find
from reproduce.page import page
from reproduce.trained import TRAINED, needed
from reproduce.verdict import Verdict, judge, published

PAGE = "figures.md"
"""All figures of a folder, for people."""


def reproduce(
    figure: Annotated[
        str, Argument(help=f"PAPER or PAPER:FIGURE; figures are {', '.join(figure_names())}.")
    ],
    scale: Annotated[
        str, Option(help="mini: the zoo on a CPU; full: published weights and tasks.")
    ] = "mini",
    out: Annotated[
        Path, Option(help="Folder of JSON, pictures, a page and samples; a killed run goes on.")
    ] = Path("reproduced"),
    data: Annotated[str | None, Option(help="File of the task, where it needs one.")] = None,
    shots: Annotated[str | None, Option(help="File of the shots, lines as in --data.")] = None,
    limit: Annotated[int | None, Option(help="Other than the figure's number of problems.")] = None,
    rounds: Annotated[int | None, Option(help="Other than the figure's number of turns.")] = None,
    loading: LoadFlags = LOAD_FLAGS,
) -> None:
    """Figures of a paper, measured again beside the published points.

    Prints the expected cost first, trains the models that are not published, and then lists which
    of the paper's claims hold.
    """
    plans = {each: planned(each, scale, limit, rounds) for each in find(figure)}
    for each, plan in plans.items():
        console.print(needs(each, plan, scale))
    for each, plan in plans.items():
        asking = TaskFlags(task=plan.task, protocol=plan.protocol, data=data, shots=shots)
        with replace_file(out / PAGE) as sheet:
            assert sheet is not None
            redraw(each, plan, scale, asking, loading, out)
            sheet.write_text(page(out), encoding="utf-8")
    console.print(f"all figures of {out} on one page: {out / PAGE}", soft_wrap=True)


def planned(figure: Figure, scale: str, limit: int | None, rounds: int | None) -> Scale:
    """How much of a figure is measured; `ValueError` for an unknown scale or a bad number."""
    if scale not in SCALES:
        message = f"scale: unknown scale {scale!r}; known are {', '.join(SCALES)}"
        raise OptionError("scale", scale, message)
    given = {"limit": limit, "rounds": rounds}
    own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    check_at_least_one(**own)
    return replace(figure.mini if scale == "mini" else figure.full, **own)


def redraw(
    figure: Figure, plan: Scale, scale: str, asking: TaskFlags, loading: LoadFlags, out: Path
) -> None:
    """Measure a figure, judge what the paper claims, write figures and picture."""
    from reproduce.plot import draw_figure

    name = figure.file(scale)
    with replace_file(out / f"{name}.json") as file, replace_file(out / f"{name}.png") as picture:
        assert file is not None and picture is not None
        found = measure(plan, asking, loading, out, name)
        lines = by_line(plan, found)
        verdicts = [
            replace(judge(claim, lines), paper=published(figure, claim)) for claim in figure.claims
        ]
        points = [dict(point) for point in figure.published()]
        show(figure, found, verdicts)
        written = {
            "provenance": provenance_record(),
            "figure": f"{figure.paper}:{figure.name}",
            "about": figure.about,
            "scale": scale,
            "rounds": plan.rounds,
            "claims": [asdict(verdict) for verdict in verdicts],
            "trained": needed(plan.every),
            "published": points,
            "results": found,
        }
        file.write_text(json.dumps(written, indent=2) + "\n")
        draw_figure(found, points, f"{name}: {figure.about}", picture)
    console.print(f"written: {out / name}.json, {out / name}.png", soft_wrap=True)


def needs(figure: Figure, plan: Scale, scale: str) -> str:
    """What a figure will take, in one line."""
    entries = plan.every
    models = dict.fromkeys(name for entry in entries for name in entry.model_names)
    tokens = plan.max_tokens or plan.setting().max_tokens
    text = (
        f"{figure.paper}:{figure.name}, {figure.about}: {len(entries)} settings on {plan.limit} "
        f"problems of {plan.task}, at most {tokens} tokens each, with {', '.join(models)}"
    )
    if made := needed(entries):
        text += f"; {len(made)} of them it trains first"
    hours = figure.hours(plan.limit) if scale == "full" else 0.0
    return text + (f"; at the published speeds up to {hours:.1f} hours" if hours else "")


def made_in(folder: Path, models: Mapping[str, str]) -> dict[str, str]:
    """Where some models lie, once all are trained; one that was begun goes on."""
    exports = {}
    for name, words in models.items():
        out = folder / name.removeprefix(TRAINED)
        console.print(f"{name}: outpace train {words}", soft_wrap=True)
        recipe, *overrides = shlex.split(words)
        run_training(recipe, [*overrides, f"out={json.dumps(str(out))}"])
        exports[name] = str(out / "export")
    return exports


def measure(
    plan: Scale, asking: TaskFlags, loading: LoadFlags, out: Path, name: str
) -> list[SideFigures]:
    """Figures of all settings, which took turns; `KeyboardInterrupt` where that was ended.

    No figure reads the samples of another: only what took turns on a machine can be compared.
    """
    entries = plan.every
    most = None if plan.max_tokens is None else str(plan.max_tokens)
    loads = LoadGrid(batch=str(plan.batch), max_tokens=most, temperature=plan.temperature)
    questions, samples = asking.load_questions(plan.limit), out / "samples" / name
    check_rounds(len(questions), plan.rounds, plan.batch)
    shapes = create_shapes(samples / "random", loading)
    shapes.paths |= made_in(out / "trained", needed(entries))
    sides = list(build_sides(entries, loads, asking, questions, loading, shapes, random=False))
    whole, interrupted = run_rounds(sides, plan.rounds, samples)
    if interrupted:
        raise KeyboardInterrupt
    return summarise_sides(sides, whole)


def by_line(plan: Scale, found: Sequence[SideFigures]) -> list[list[SideFigures]]:
    """Figures by the lines of the plan."""
    rest = iter(found)
    return [list(islice(rest, len(line))) for line in plan.entries()]


def show(figure: Figure, found: Sequence[SideFigures], verdicts: Sequence[Verdict]) -> None:
    """Print what was measured, and what became of the claims."""
    print_names(found)
    console.print(results_table(found))
    table = Table(title=f"{figure.paper}:{figure.name}", header_style="bold")
    for name in ("claim", "here", "measured", "in the paper"):
        table.add_column(name, overflow="fold")
    for verdict in verdicts:
        holds = "holds" if verdict.holds else "does not hold"
        table.add_row(verdict.says, holds, verdict.told, verdict.paper)
    console.print(table)
