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
from typer import Argument, Option

from outpace.api.options import RequestOptions
from outpace.cli.draw import console, replace_file
from outpace.cli.flags import LOAD_FLAGS, LoadFlags
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
    list_all: Annotated[
        bool, Option("--list", help="List the figures with their time and memory, and exit.")
    ] = False,
    loading: LoadFlags = LOAD_FLAGS,
) -> None:
    """Reproduce the figures of a paper, next to the published points.

    Prints the expected cost first, trains the models that are not published, and then lists which
    of the paper's claims hold. Models that do not fit into memory together are measured in turn.
    """
    from outpace.lab.reproduce.figure import (
        PAPERS,
        data_files,
        find_at,
        given_models,
        model_paths,
        shot_files,
    )
    from outpace.lab.reproduce.page import page

    if list_all:
        console.print(costs_of(PAPERS if figure is None else [figure]))
        return
    if figure is None:
        raise OptionError("figure", None, "give PAPER or PAPER:FIGURE; --list names them")
    plans = [
        (each, resize(plan, limit, rounds))
        for each in find_at(figure, scale)
        for plan in each.scales[scale]
    ]
    paths = model_paths(models or (), [plan for _, plan in plans])
    absent = [name for name in given_models(plan for _, plan in plans) if name not in paths]
    plans = [(each, plan.with_models(paths)) for each, plan in plans]
    if absent:
        names = ", ".join(absent)
        console.print(f"without a path of {names}: lines and claims that need it are left out")
    files = data_files(data or (), [plan for _, plan in plans])
    examples = shot_files(shots or (), [plan for _, plan in plans])
    for each, plan in plans:
        console.print(needs(each, plan, scale))
    parts = [
        make_part(each, plan, scale, files.get(plan.task), examples.get(plan.task))
        for each, plan in plans
    ]
    for part in parts:
        split_by_memory(part.plan.every, loading)
    for part in parts:
        with replace_file(out / PAGE) as sheet:
            assert sheet is not None
            redraw(part, loading, out)
            sheet.write_text(page(out), encoding="utf-8")
    console.print(f"all figures of {out} on one page: {out / PAGE}", soft_wrap=True)


def resize(plan: Scale, limit: int | None, rounds: int | None) -> Scale:
    """Set the numbers of problems and rounds; by default, each round fills the largest batch."""
    check_at_least_one(limit=limit, rounds=rounds)
    problems = limit or plan.limit
    minutes = None if plan.minutes is None else plan.minutes * problems / plan.limit
    most = rounds or max(min(plan.rounds, problems // max(plan.batch)), 1)
    return replace(plan, limit=problems, rounds=most, minutes=minutes)


def make_part(figure: Figure, plan: Scale, scale: str, file: str | None, shots: str | None) -> Part:
    """Load the questions of a part; `ValueError` for an invalid file, or too few questions."""
    from outpace.lab.side import check_rounds

    asking = TaskFlags(task=plan.task, protocol=plan.protocol, data=file, shots=shots)
    questions = asking.load_questions(plan.limit)
    check_rounds(len(questions), plan.rounds, max(plan.batch))
    return Part(figure=figure, scale=scale, plan=plan, asking=asking, questions=questions)


def redraw(part: Part, loading: LoadFlags, out: Path) -> None:
    """Measure a part, judge its claims, and write figures and picture."""
    from outpace.lab.plots import draw_figure
    from outpace.lab.reproduce.figure import needed

    figure, plan, name = part.figure, part.plan, part.name
    with replace_file(out / f"{name}.json") as file, replace_file(out / f"{name}.png") as picture:
        assert file is not None and picture is not None
        found = measure(part, loading, out)
        verdicts = judge_all(part, found)
        points = [dict(point) for point in figure.published(plan.task)]
        show(part, found, verdicts)
        written = {
            "provenance": provenance_record(),
            "figure": f"{figure.paper}:{figure.name}",
            "about": figure.about,
            "scale": part.scale,
            "rounds": plan.rounds,
            "claims": [asdict(verdict) for verdict in verdicts],
            "trained": needed(plan.every),
            "published": points,
            "results": found,
        }
        file.write_text(json.dumps(written, indent=2) + "\n")
        draw_figure(found, points, f"{name}: {figure.about}", picture)
    console.print(f"written: {out / name}.json, {out / name}.png", soft_wrap=True)


def judge_all(part: Part, found: Sequence[SideFigures]) -> list[Verdict]:
    from outpace.lab.reproduce.verdict import judge, judge_texts, published

    figure, plan = part.figure, part.plan
    lines = by_line(plan, found)
    verdicts = [
        replace(
            judge(claim, lines),
            paper=published(figure, claim, plan.task),
            note=claim.note if part.scale == "mini" else "",
        )
        for claim in figure.claims_at(part.scale)
        if lines[claim.line - 1] and (claim.than is None or lines[claim.than - 1])
    ]
    return [*verdicts, judge_texts(found)] if plan.is_lossless else verdicts


def needs(figure: Figure, plan: Scale, scale: str) -> str:
    """Return the expected cost of a figure in one line."""
    from outpace.lab.reproduce.figure import needed

    entries = plan.every
    models = dict.fromkeys(name for entry in entries for name in entry.model_names)
    text = (
        f"{figure.paper}:{figure.name}, {figure.about}: {len(entries)} settings on {plan.limit} "
        f"problems of {plan.task}, at most {plan.longest} tokens each, with {', '.join(models)}"
    )
    if made := needed(entries):
        text += f"; {len(made)} of them it trains first"
    if memory := memory_of(plan):
        text += f"; {memory} of weights and caches in 16 bits"
    time = time_of(figure, plan, scale)
    return text + (f"; {time}" if time else "")


def memory_of(plan: Scale) -> str:
    """Return the GiB of all models together and of the largest; empty without known sizes."""
    from outpace.lab.reproduce.memory import gib_of, group_entries

    most = max(map(gib_of, group_entries(plan.every)))
    return f"{gib_of(plan.every):.0f} GiB ({most:.0f} in turn)" if most else ""


def time_of(figure: Figure, plan: Scale, scale: str) -> str:
    """Return the expected time; empty if it is not known."""
    if plan.minutes is not None:
        return f"about {plan.minutes:.1f} minutes of CPU time"
    hours = figure.published_seconds(plan) / 3600 if scale == "full" else 0.0
    return f"about {hours:.1f} hours at the published speeds" if hours else ""


def costs_of(names: Iterable[str]) -> Table:
    """Return a table of figures with the costs of each scale."""
    from outpace.lab.reproduce.figure import find

    table = Table(header_style="bold")
    for column in ("figure", "scale", "settings", "problems", "time", "memory"):
        table.add_column(column, no_wrap=column == "figure", overflow="fold")
    for figure in (figure for name in names for figure in find(name)):
        for scale, plan in ((s, p) for s, plans in figure.scales.items() for p in plans):
            costs = time_of(figure, plan, scale), memory_of(plan)
            label = f"{figure.paper}:{figure.name}"
            table.add_row(label, scale, str(len(plan.every)), f"{plan.limit} {plan.task}", *costs)
    return table


def split_by_memory(entries: Sequence[MethodEntry], loading: LoadFlags) -> list[list[MethodEntry]]:
    """Return the entries by parts that fit into memory; `OptionError` if one does not."""
    from outpace.engine.stats import available_bytes
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
    """Train models, resuming earlier runs, and return the folders of their exports."""
    from outpace.lab.reproduce.figure import TRAINED

    exports = {}
    for name, words in models.items():
        out = folder / name.removeprefix(TRAINED)
        console.print(f"{name}: outpace train {words}", soft_wrap=True)
        recipe, *overrides = shlex.split(words)
        run_training(recipe, [*overrides, f"out={json.dumps(str(out))}"])
        exports[name] = str(out / "export")
    return exports


def measure(part: Part, loading: LoadFlags, out: Path) -> list[SideFigures]:
    """Measure all settings in turns; `KeyboardInterrupt` if that was interrupted.

    No figure reads the samples of another: only what took turns on a machine can be compared.
    """
    from outpace.engine.stats import release_memory
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
    """Add the paper's speed-up and acceptance length of a line to its figures."""
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
    from outpace.lab.reproduce.verdict import holding

    print_names(found)
    console.print(results_table(found))
    table = Table(title=part.name, header_style="bold")
    for name in ("claim", "here", "measured", "in the paper"):
        table.add_column(name, overflow="fold")
    for verdict in verdicts:
        holds = holding(verdict.holds, verdict.note)
        table.add_row(verdict.claim, holds, verdict.finding, verdict.paper)
    console.print(table)
