"""The command `benchmark methods`, which compares methods in alternating turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Argument, Option

from outpace.api.options import Options
from outpace.cli.draw import console, replace_file
from outpace.cli.flags import (
    LOAD_FLAGS,
    PROMPT_FILE_HELP,
    JsonFlag,
    LimitFlag,
    LoadFlags,
    SeedFlag,
    TemperatureFlag,
)
from outpace.cli.terminal import ProgressBars
from outpace.errors import OptionError
from outpace.field_types import check_at_least_one
from outpace.lab.commands.report import show_truncated
from outpace.lab.commands.task_flags import TASK_FLAGS, TaskFlags
from outpace.lab.protocol import Question, Setting, find_setting
from outpace.provenance import provenance_record

if TYPE_CHECKING:
    from outpace.lab.entry import MethodEntry
    from outpace.lab.side import RequestLoad, Side, SideFigures
    from outpace.methods import Method


COUNTING_NOTE = (
    "output tokens of the answers, without prompts; each side first answered one warm-up batch"
)


AUTO_NOTE = (
    "auto: the draft length follows the measured time of passes, and tokens per forward follow it"
)

PROMPT_SETTING = Setting(task="", score="none", max_tokens=256)
"""Setting of prompts without reference answers."""


@dataclass(frozen=True, kw_only=True)
class LoadGrid:
    """Flags of the loads to compare under, and of sampling."""

    batch: Annotated[str, Option(help="Numbers of concurrent requests, such as 1,4,16.")] = "1"
    prompt_length: Annotated[
        str | None,
        Option(help="Prompt lengths to truncate to, such as 64,256; measures speed only."),
    ] = None
    max_tokens: Annotated[
        str | None,
        Option(help="Maximum answer lengths, such as 64,256; by default the protocol's."),
    ] = None
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Generate max-tokens for each answer.")
    ] = False
    temperature: TemperatureFlag = None
    seed: SeedFlag = 0

    def build_loads(self) -> list[RequestLoad]:
        from outpace.lab.side import RequestLoad

        batches = parse_counts(self.batch, "batch")
        lengths: list[int | None] = [None]
        if self.prompt_length is not None:
            lengths = [*parse_counts(self.prompt_length, "prompt_length")]
        limits: list[int | None] = [None]
        if self.max_tokens is not None:
            limits = [*parse_counts(self.max_tokens, "max_tokens")]
        return [
            RequestLoad(batch=batch, max_tokens=tokens, prompt_length=length)
            for length, tokens, batch in product(lengths, limits, batches)
        ]

    def options(self, load: RequestLoad) -> Options:
        return Options(
            max_tokens=load.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )


LOAD_GRID = LoadGrid()


def benchmark_methods(
    entries: Annotated[
        list[str],
        Argument(
            help="'MODEL METHOD option=value …'; commas sweep an option. MODEL alone is one token "
            "per forward, and the model's default method."
        ),
    ],
    prompts: Annotated[
        Path | None, Option(help=f"{PROMPT_FILE_HELP}, in place of a task; measures speed only.")
    ] = None,
    loads: LoadGrid = LOAD_GRID,
    rounds: Annotated[int, Option(help="Number of turns per side, in alternating order.")] = 10,
    task_flags: TaskFlags = TASK_FLAGS,
    limit: LimitFlag = 100,
    load_flags: LoadFlags = LOAD_FLAGS,
    samples: Annotated[
        Path | None, Option(help="Folder for completed turns, from which a killed run resumes.")
    ] = None,
    json_path: JsonFlag = None,
    png: Annotated[
        Path | None, Option(help="Write a plot of accuracy and speed to this file.")
    ] = None,
) -> None:
    """Compare accuracy, latency and speed of methods that take turns on the same questions.

    Ratios are medians over the rounds, relative to the first entry under the same load; CPU time is
    compared if all run on a CPU.
    """
    from outpace.lab.entry import parse_entries
    from outpace.lab.side import check_rounds

    contest = [e for text in entries for e in parse_entries(text, load_flags.adapter)]
    batch = max(parse_counts(loads.batch, "batch"))
    if prompts is None:
        setting, questions = task_flags.load_setting(), task_flags.load_questions(limit)
    else:
        setting = task_flags.replace_task("prompts", prompts, PROMPT_SETTING)
        questions = repeat_prompts(prompts, limit, rounds * batch)
    check_rounds(len(questions), rounds, batch)
    if png is not None:
        from outpace.lab.plots import draw_front

        if loads.prompt_length is not None or prompts is not None:
            raise OptionError(
                "png", png, "needs accuracy, which --prompts and --prompt-length do not measure"
            )
    with replace_file(json_path) as file, replace_file(png) as drawing:
        sides = list(build_sides(contest, loads, task_flags, questions, load_flags, setting))
        results = measure_sides(sides, rounds, file, samples=samples)
        if not loads.ignore_eos:
            show_truncated(results)
        if drawing is not None:
            draw_front(results, drawing)
    check_complete(sides, rounds)


def repeat_prompts(path: Path, limit: int, least: int) -> list[Question]:
    from outpace.data.prompt_set import read_prompt_file

    check_at_least_one(limit=limit)
    prompts = [Question(prompt, None, "none") for prompt in read_prompt_file(path)[:limit]]
    return prompts * max(-(-least // len(prompts)), 1)


def measure_sides(
    sides: Sequence[Side],
    rounds: int,
    file: Path | None,
    *,
    samples: Path | None = None,
    warm_up: bool = True,
) -> list[SideFigures]:
    """Measure sides in turns, print their figures, and write them to a file if there is one.

    After Ctrl-C the figures are those of the complete rounds, if there is any.
    """
    from outpace.lab.side import summarise_sides

    done, interrupted = run_rounds(sides, rounds, samples, warm_up=warm_up)
    if not done:
        raise KeyboardInterrupt
    results = summarise_sides(sides, done)
    print_names(results)
    console.print(results_table(results))
    if any(each["is_auto"] for each in results):
        console.print(AUTO_NOTE, style="dim")
    if file is not None:
        details = {"rounds": done, "interrupted": interrupted, "counted": COUNTING_NOTE}
        document = {"provenance": provenance_record(), **details, "results": results}
        file.write_text(json.dumps(document, indent=2) + "\n")
    return results


def check_complete(sides: Sequence[Side], rounds: int) -> None:
    """Raise `KeyboardInterrupt` if Ctrl-C ended the turns."""
    if any(len(side.turns) < rounds for side in sides):
        raise KeyboardInterrupt


def parse_counts(text: str, name: str) -> list[int]:
    try:
        parsed = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(name, text, "must be a list of numbers such as 1,2,4") from None
    for number in parsed:
        check_at_least_one(**{name: number})
    return parsed


def build_sides(
    entries: Sequence[MethodEntry],
    loads: LoadGrid,
    task_flags: TaskFlags,
    questions: Sequence[Question],
    load_flags: LoadFlags,
    setting: Setting,
    paths: Mapping[str, str] = {},
) -> Iterator[Side]:
    """Yield a side per entry and load; raises `ValueError` before anything runs.

    `paths` has the folders of models that are named otherwise in the entries.
    """
    from outpace.lab.run import resolve_options
    from outpace.lab.side import Side, prompts_of_length

    levels = loads.build_loads()
    loaded = [entry.with_models(paths) for entry in entries]
    adapted: dict[str | None, list[tuple[str, Method]]] = {}
    for each in loaded:
        adapted.setdefault(each.adapter, []).append((each.model, each.method))
    flags = {name: load_flags.with_values(adapter=name or load_flags.adapter) for name in adapted}
    for adapter, pairs in adapted.items():
        flags[adapter].check_methods(pairs)
    llms = {adapter: flags[adapter].open_models(pairs) for adapter, pairs in adapted.items()}
    for load in levels:
        request = loads.options(load)
        for entry, each in zip(entries, loaded, strict=True):
            llm, own = llms[each.adapter][each.model], setting
            if entry.task or entry.protocol:
                task, protocol = entry.task or setting.task, entry.protocol or task_flags.protocol
                own = task_flags.change_setting(find_setting(task, protocol))
            prompts, length = questions, load.prompt_length
            if entry.task:
                prompts = own.load_questions(None, len(questions), None)
            if length is not None:
                prompts = prompts_of_length(llm, questions, length)
            yield Side(
                entry=entry,
                llm=llm,
                load=load if entry.batch is None else replace(load, batch=entry.batch),
                questions=prompts,
                options=resolve_options(llm, own, prompts, request | Options(method=each.method)),
                task="" if length else own.task,
                protocol=task_flags.protocol if own.task and not length else "",
            )


def run_rounds(
    sides: Sequence[Side], rounds: int, samples: Path | None, *, warm_up: bool = True
) -> tuple[int, bool]:
    """Measure with a progress bar; returns the complete rounds, and whether Ctrl-C interrupted."""
    from outpace.lab.side import alternate_turns

    whole = 0
    with ProgressBars() as shown:
        bar = shown.add_task("turns", total=rounds * len(sides))

        def update_bar(side: Side) -> None:
            shown.update(bar, advance=1, description=side.entry.name)

        try:
            turns = alternate_turns(
                sides, rounds, samples=samples, warm_up=warm_up, progress=update_bar
            )
            for done in turns:
                whole = done
        except KeyboardInterrupt:
            return whole, True
    return whole, False


def results_table(results: Sequence[SideFigures]) -> Table:
    """Build a table with a line per side; only judged answers have a column of quality."""
    quality = {}
    if "likelihood" in results[0]:
        quality = {"nats\nper token": [f"{each['likelihood']:.2f}" for each in results]}
    elif any(each["accuracy"] is not None for each in results):
        quality = {"accuracy\n95 %": [format_accuracy(each) for each in results]}
    has_cpu = results[0]["clock"] == "cpu"
    speed = "tokens\nper CPU s\nper s" if has_cpu else "tokens\nper s"
    speeds = ["tokens_per_cpu_second"] * has_cpu + ["tokens_per_second"]
    columns = (*quality, "tokens\nper forward", speed, "p50 s\np95 s", "first\ntext s")
    loads = {"batch": "batch", "prompt_length": "prompt", "max_tokens": "max\ntokens"}
    varying = [key for key in loads if len({each[key] for each in results}) > 1]
    table = Table(header_style="bold")
    for name in ("", *(loads[key] for key in varying), *columns, "faster\n95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, each in enumerate(results):
        table.add_row(
            str(number + 1),
            *(str(each[key]) for key in varying),
            *(cells[number] for cells in quality.values()),
            format_rate(each),
            "\n".join(format_number(each[key]) for key in speeds),
            f"{each['latency']['p50']:.3f}\n{each['latency']['p95']:.3f}",
            f"{each['first_text']['p50']:.3f}",
            format_ratio(each),
        )
    return table


def format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_rate(result: SideFigures) -> str:
    error = result["tokens_per_forward_error"]
    lines = [f"{result['tokens_per_forward']:.2f}", "" if error is None else f"± {error:.2f}"]
    return "\n".join(filter(None, [*lines, "auto" if result["is_auto"] else ""]))


def format_accuracy(result: SideFigures) -> str:
    if result["accuracy"] is None:
        return "—"
    low, high = result["interval"]
    return f"{result['accuracy']:.1%}\n{low:.1%}–{high:.1%}"


def print_names(results: Sequence[SideFigures]) -> None:
    from outpace.lab.compare import result_title

    for number, each in enumerate(results, 1):
        console.print(f"{number}  {result_title(each)}", soft_wrap=True)


def format_ratio(result: SideFigures) -> str:
    """Format a ratio with its interval; one of CPU time is followed by that of wall time."""
    faster, wall = result["faster"], result["faster_wall"]
    if faster is None:
        return ""
    lines = [f"{faster['ratio']:.2f} ×"]
    if faster["interval"] is not None:
        lines.append("{:.2f}–{:.2f}".format(*faster["interval"]))
    if result["clock"] == "cpu":
        lines.append(f"{wall['ratio']:.2f} × wall")
    return "\n".join(lines)
