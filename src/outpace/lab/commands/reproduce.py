"""The command `reproduce`, which measures figures of papers again."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Argument, Exit, Option

from outpace.api.options import RequestOptions
from outpace.cli.draw import console, replace_file
from outpace.cli.flags import LOAD_FLAGS, LoadFlags
from outpace.cli.terminal import FAILED, error_console
from outpace.cli.training import run_training
from outpace.errors import OptionError
from outpace.field_types import check_at_least_one
from outpace.lab.commands.benchmark_methods import (
    LoadGrid,
    build_sides,
    print_names,
    results_table,
    run_rounds,
)
from outpace.lab.commands.task_flags import TaskFlags
from outpace.lab.protocol import Question
from outpace.lab.reproduce.figure import figure_names
from outpace.provenance import provenance_record

if TYPE_CHECKING:
    from outpace.lab.entry import MethodEntry
    from outpace.lab.reproduce.figure import Figure, Scale
    from outpace.lab.reproduce.verdict import Verdict
    from outpace.lab.side import Side, SideFigures


PAGE = "figures.md"
"""File with all figures of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A task of a figure with its questions."""

    figure: Figure
    scale: str
    plan: Scale
    asking: TaskFlags
    questions: Sequence[Question]

    @property
    def name(self) -> str:
        return self.figure.file(self.scale, self.plan)


def reproduce(
    figure: Annotated[
        str | None,
        Argument(help=f"PAPER or PAPER:FIGURE; figures are {', '.join(figure_names())}."),
    ] = None,
    scale: Annotated[
        str,
        Option(
            help="mini: the zoo on a CPU; small: a small published model with drafts that you "
            "trained, on a CPU; full: published weights and tasks."
        ),
    ] = "mini",
    out: Annotated[
        Path, Option(help="Folder of JSON, pictures, a page and samples; a killed run goes on.")
    ] = Path("reproduced"),
    models: Annotated[
        list[str] | None,
        Option(
            "--model",
            help="NAME=PATH of a model of small, such as target=FILE; lines of others are left "
            "out.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        Option(help="File of the task, where it needs one; of several tasks, TASK=FILE for each."),
    ] = None,
    shots: Annotated[
        list[str] | None, Option(help="File of the shots, lines as in --data, or TASK=FILE.")
    ] = None,
    limit: Annotated[int | None, Option(help="Other than the figure's number of problems.")] = None,
    rounds: Annotated[int | None, Option(help="Other than the figure's number of turns.")] = None,
    every: Annotated[
        bool,
        Option("--all", help="All figures of the scale; those that fail are named at the end."),
    ] = False,
    list_all: Annotated[
        bool, Option("--list", help="List the figures with their time and memory, and exit.")
    ] = False,
    loading: LoadFlags = LOAD_FLAGS,
) -> None:
    """Reproduce the figures of a paper, or of all, next to the published points.

    Prints the expected cost first, trains the models that are not published, and then lists which
    of the paper's claims hold. Models that do not fit into memory together are measured in turn.
    """
    from outpace.lab.reproduce.figure import (
        PAPERS,
        figures_at,
        find,
        find_at,
        given_models,
        model_paths,
        shot_files,
        task_files,
    )

    if list_all:
        listed = [each for name in ([figure] if figure else PAPERS) for each in find(name)]
        scales = ((each, *pair) for each in listed for pair in each.scales.items())
        console.print(costs_of((each, name, plan) for each, name, of in scales for plan in of))
        return
    if (figure is None) != every:
        raise OptionError("figure", figure, "give PAPER, PAPER:FIGURE or --all; --list names them")
    plans = [
        (each, resize(plan, limit, rounds))
        for each in (find_at(figure, scale) if figure else figures_at(scale))
        for plan in each.scales[scale]
    ]
    paths = model_paths(models or (), [plan for _, plan in plans])
    absent = [name for name in given_models(plan for _, plan in plans) if name not in paths]
    plans = [(each, plan.with_models(paths)) for each, plan in plans]
    if absent:
        names = ", ".join(absent)
        console.print(f"without a path of {names}: lines and claims that need it are left out")
    files = task_files(data or (), [plan for _, plan in plans], "data")
    examples = shot_files(shots or (), [plan for _, plan in plans])
    console.print(costs_of((each, scale, plan) for each, plan in plans))
    parts = [
        make_part(each, plan, scale, files.get(plan.task), examples.get(plan.task))
        for each, plan in plans
    ]
    for part in parts:
        split_by_memory(part.plan.every, loading)
    measure_parts(parts, loading, out, to_end=every)


def resize(plan: Scale, limit: int | None, rounds: int | None) -> Scale:
    """Set the numbers of problems and rounds; by default, each round fills the largest batch."""
    check_at_least_one(limit=limit, rounds=rounds)
    problems = limit or plan.limit
    minutes = None if plan.minutes is None else plan.minutes * problems / plan.limit
    most = rounds or max(min(plan.rounds, problems // max(plan.batch)), 1)
    return replace(plan, limit=problems, rounds=most, minutes=minutes)


def make_part(figure: Figure, plan: Scale, scale: str, file: str | None, shots: str | None) -> Part:
    from outpace.lab.side import check_rounds

    asking = TaskFlags(task=plan.task, protocol=plan.protocol, data=file, shots=shots)
    questions = asking.load_questions(plan.limit)
    check_rounds(len(questions), plan.rounds, max(plan.batch))
    return Part(figure=figure, scale=scale, plan=plan, asking=asking, questions=questions)


def measure_parts(parts: Sequence[Part], loading: LoadFlags, out: Path, *, to_end: bool) -> None:
    """Measure figures one after another, with `to_end` also past those that fail."""
    from outpace.lab.reproduce.page import page

    failed = {}
    for part in parts:
        try:
            with replace_file(out / PAGE) as sheet:
                assert sheet is not None
                redraw(part, loading, out)
                sheet.write_text(page(out), encoding="utf-8")
        except Exception as error:
            if not to_end:
                raise
            failed[part.name] = f"{type(error).__name__}: {error}"
            error_console.print(f"{part.name} failed: {failed[part.name]}", soft_wrap=True)
    console.print(f"all figures of {out} on one page: {out / PAGE}", soft_wrap=True)
    if failed:
        names = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        error_console.print(f"{len(failed)} of {len(parts)} failed:\n{names}", soft_wrap=True)
        raise Exit(FAILED)


def redraw(part: Part, loading: LoadFlags, out: Path) -> None:
    from outpace.lab.plots import draw_figure
    from outpace.lab.reproduce.figure import needed
    from outpace.lab.reproduce.verdict import judge_figure

    figure, plan, name = part.figure, part.plan, part.name
    with replace_file(out / f"{name}.json") as file, replace_file(out / f"{name}.png") as picture:
        assert file is not None and picture is not None
        found = measure(part, loading, out)
        points = [dict(point) for point in figure.published(plan.task)]
        written = {
            "provenance": provenance_record(),
            "figure": f"{figure.paper}:{figure.name}",
            "about": figure.about,
            "scale": part.scale,
            "rounds": plan.rounds,
            "claims": [],
            "trained": needed(plan.every),
            "published": points,
            "judge": plan.judge,
            "lines": [len(line) for line in plan.entries],
            "results": found,
        }
        verdicts = judge_figure(figure, part.scale, plan, written)
        written["claims"] = [asdict(verdict) for verdict in verdicts]
        show(part, found, verdicts)
        file.write_text(json.dumps(written, indent=2) + "\n")
        draw_figure(found, points, f"{name}: {figure.about}", picture)
    console.print(f"written: {out / name}.json, {out / name}.png", soft_wrap=True)


def memory_of(plan: Scale) -> str:
    from outpace.lab.reproduce.memory import gib_of, group_entries

    most = max(map(gib_of, group_entries(plan.every)))
    return f"{gib_of(plan.every):.0f} GiB ({most:.0f} in turn)" if most else ""


def costs_of(plans: Iterable[tuple[Figure, str, Scale]]) -> Table:
    from outpace.lab.reproduce.figure import needed

    table, total = Table(header_style="bold"), 0.0
    for column in ("figure", "scale", "settings", "trained first", "problems", "CPU min", "memory"):
        table.add_column(column, no_wrap=column == "figure", overflow="fold")
    for figure, scale, plan in plans:
        entries, label = plan.every, f"{figure.paper}:{figure.name}"
        counts = str(len(entries)), str(len(needed(entries)) or ""), f"{plan.limit} {plan.task}"
        minutes = "" if plan.minutes is None else f"{plan.minutes:.1f}"
        total += plan.minutes or 0.0
        table.add_row(label, scale, *counts, minutes, memory_of(plan))
    table.columns[5].footer, table.show_footer = f"{total:.0f}", table.row_count > 1
    return table


def split_by_memory(entries: Sequence[MethodEntry], loading: LoadFlags) -> list[list[MethodEntry]]:
    from outpace.engine.memory import available_bytes
    from outpace.lab.reproduce.memory import CACHE_GIB, QUANTIZED_BYTES, fit_entries
    from outpace.models.device import resolve_device, resolve_dtype

    device = resolve_device(loading.device)
    free = available_bytes(device)
    number_bytes = QUANTIZED_BYTES.get(
        loading.quantize or "", resolve_dtype(loading.dtype, device).itemsize
    )
    return fit_entries(
        entries,
        math.inf if free is None else free / 2**30,
        number_bytes,
        loading.cache_gib or CACHE_GIB,
    )


def made_in(folder: Path, models: Mapping[str, str]) -> dict[str, str]:
    from outpace.lab.reproduce.figure import TRAINED, TRAINED_NAME

    exports: dict[str, str] = {}
    for name, words in models.items():
        out = folder / name.removeprefix(TRAINED)
        console.print(f"{name}: outpace train {words}", soft_wrap=True)
        words = TRAINED_NAME.sub(lambda match: shlex.quote(exports[match[0]]), words)
        recipe, *overrides = shlex.split(words)
        run_training(recipe, [*overrides, f"out={json.dumps(str(out))}"])
        exports[name] = str(out / "export")
    return exports


def measure(part: Part, loading: LoadFlags, out: Path) -> list[SideFigures]:
    """Measure all settings in turns; `KeyboardInterrupt` if that was interrupted.

    No figure reads the samples of another: only what took turns on a machine can be compared.
    """
    from outpace.engine.memory import release_memory
    from outpace.lab.reproduce.figure import needed
    from outpace.lab.reproduce.memory import CACHE_GIB
    from outpace.lab.side import summarise_sides
    from outpace.methods import Autoregressive

    plan, entries, samples = part.plan, part.plan.every, out / "samples" / part.name
    most = None if plan.max_tokens is None else str(plan.max_tokens)
    loads = LoadGrid(max_tokens=most, temperature=plan.temperature)
    paths = made_in(out / "trained", needed(entries))
    caching = loading.with_values(cache_gib=loading.cache_gib or CACHE_GIB)
    if plan.judge is not None:
        caching.check_methods([(plan.judge, Autoregressive())])
    sides: list[Side] = []
    for together in split_by_memory(entries, loading):
        asking, setting = part.asking, part.asking.load_setting()
        added = list(build_sides(together, loads, asking, part.questions, caching, setting, paths))
        sides += added
        _, interrupted = run_rounds(added, plan.rounds, samples)
        if interrupted:
            raise KeyboardInterrupt
        for side in added:
            side.unload()
        release_memory()
    order = {entry.name: number for number, entry in enumerate(entries)}
    sides.sort(key=lambda side: order[side.entry.name])
    found = summarise_sides(sides, plan.rounds)
    add_published(part, found)
    if plan.judge is not None:
        add_likelihoods(part, sides, found, caching)
    if plan.is_lossless:
        for side, figures in zip(sides, found, strict=True):
            figures["equal"] = equal_share(side, sides[0])
    return found


def add_published(part: Part, found: Sequence[SideFigures]) -> None:
    for line, figures in zip(part.plan.lines, by_line(part.plan, found), strict=True):
        if "paper" in line:
            point = part.figure.point(line["paper"], part.plan.task)
            for each in figures:
                each["paper"] = {key: point[key] for key in ("speedup", "acceptance_length")}


def add_likelihoods(
    part: Part, sides: Sequence[Side], found: Sequence[SideFigures], loading: LoadFlags
) -> None:
    """Add the log-likelihood per token of each side's answers by the judge of the scale."""
    from outpace.lab.entry import MethodEntry
    from outpace.lab.likelihood import score_answers
    from outpace.methods import Autoregressive

    assert part.plan.judge is not None
    entry = MethodEntry(model=part.plan.judge, method=Autoregressive(), line="judge")
    asking, setting = part.asking, part.asking.load_setting()
    (judge,) = build_sides([entry], LoadGrid(), asking, part.questions, loading, setting)
    asked = RequestOptions.of(judge.options)
    prompts = [judge.llm.text.encode_request(q.prompt, asked)[0] for q in part.questions]
    for side, figures in zip(sides, found, strict=True):
        console.print(f"likelihood of the answers: {side.entry.name}", soft_wrap=True)
        texts = [output.text for turn in side.turns for output in turn.outputs]
        sums, counts = score_answers(judge.llm, zip(prompts, texts, strict=True))
        figures["likelihood"] = round(sum(sums) / max(sum(counts), 1), 4)
        figures["samples"] |= {"likelihood": [round(s, 3) for s in sums], "judged": counts}


def equal_share(side: Side, first: Side) -> float:
    """Return the share of answers whose tokens equal those of another side."""
    mine, its = ([out.ids for turn in each.turns for out in turn.outputs] for each in (side, first))
    return sum(a == b for a, b in zip(mine, its, strict=True)) / len(mine)


def by_line(plan: Scale, found: Sequence[SideFigures]) -> list[list[SideFigures]]:
    rest = iter(found)
    return [list(islice(rest, len(line))) for line in plan.entries]


def show(part: Part, found: Sequence[SideFigures], verdicts: Sequence[Verdict]) -> None:
    from outpace.lab.reproduce.verdict import describe

    print_names(found)
    console.print(results_table(found))
    table = Table(title=part.name, header_style="bold")
    for name in ("claim", "here", "measured", "in the paper"):
        table.add_column(name, overflow="fold")
    for verdict in verdicts:
        words = describe(verdict.verdict, verdict.note)
        table.add_row(verdict.claim, words, verdict.finding, verdict.paper)
    console.print(table)
