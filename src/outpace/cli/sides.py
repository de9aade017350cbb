"""The command that lets methods take turns: `benchmark methods`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from outpace.api.options import Options
from outpace.benchmark.entry import Entry
from outpace.benchmark.prompts import LENGTH, of_length
from outpace.benchmark.shape import Shapes
from outpace.benchmark.side import Load, Side, alternate, check_rounds
from outpace.benchmark.summary import Figures, summaries
from outpace.cli.asking import ASKING, Asking
from outpace.cli.benchmark import numbers
from outpace.cli.draw import bars, console, show_cut
from outpace.cli.flags import LOADING, JsonPath, Limit, Loading, Seed, Temperature
from outpace.cli.options import parse_entries
from outpace.cli.output import replaced
from outpace.evaluation.question import Question
from outpace.methods import Method
from outpace.methods.bounds import at_least_one
from outpace.models.device import resolve_device, resolve_dtype
from outpace.provenance import provenance

COUNTED = (
    "output tokens of the answers, no prompts; each side answered a batch first that does not count"
)


@dataclass(frozen=True, kw_only=True)
class Loads:
    """The loads of a comparison, and how tokens are chosen under all of them."""

    batch: Annotated[str, Option(help="Requests that run at a time, as 1,4,16.")] = "1"
    prompt_length: Annotated[
        str | None, Option(help="Tokens of prompts that are cut to it, as 64,256; for speed alone.")
    ] = None
    max_tokens: Annotated[
        str | None, Option(help="Most tokens of an answer, as 64,256; the protocol's if none.")
    ] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Answers of max-tokens each.")] = False
    temperature: Temperature = None
    seed: Seed = 0

    def all(self, usual: int, *, random: bool) -> list[Load]:
        """Each combination; `ValueError` for a number below one."""
        batches = counts(self.batch, "batch")
        lengths = [LENGTH] if random else [None]
        if self.prompt_length is not None:
            lengths = [*counts(self.prompt_length, "prompt_length")]
        most = [usual] if self.max_tokens is None else counts(self.max_tokens, "max_tokens")
        return [
            Load(batch=batch, max_tokens=tokens, prompt_length=length)
            for length, tokens, batch in product(lengths, most, batches)
        ]

    def options(self, load: Load, *, random: bool) -> Options:
        """What requests of a load choose; answers of random weights are all of one length."""
        return Options(
            max_tokens=load.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=self.ignore_eos or random,
        )


LOADS = Loads()


def benchmark_methods(
    entries: Annotated[
        list[str],
        Argument(
            help="'MODEL METHOD option=value …'; commas sweep an option, random:SHAPE is a model "
            "of random weights."
        ),
    ],
    loads: Loads = LOADS,
    rounds: Annotated[int, Option(help="Turns of each side, in alternating order.")] = 10,
    asking: Asking = ASKING,
    limit: Limit = 100,
    loading: Loading = LOADING,
    samples: Annotated[
        Path | None, Option(help="Folder that keeps the turns; a killed run goes on from it.")
    ] = None,
    json_path: JsonPath = None,
    png: Annotated[Path | None, Option(help="Draw accuracy and speed here.")] = None,
) -> None:
    """Accuracy, latency and speed of methods that take turns on the same questions.

    Ratios are medians over the rounds, against the first entry under the same load, by CPU time
    where all run on a CPU. Models of random weights show what forwards cost, and nothing else.
    """
    contest = [entry for text in entries for entry in parse_entries(text)]
    random, questions = are_random(contest), asking.questions(limit)
    check_rounds(len(questions), rounds, max(counts(loads.batch, "batch")))
    if png is not None:
        from outpace.benchmark.plots import draw_sides
    with replaced(json_path) as file, replaced(png) as drawing, TemporaryDirectory() as folder:
        shapes = shapes_in(Path(folder), loading)
        sides = list(line_up(contest, loads, asking, questions, loading, shapes, random=random))
        rounds, interrupted = run(sides, rounds, samples)
        if not rounds:
            raise KeyboardInterrupt
        found = summaries(sides, rounds)
        list_names(found)
        console.print(costs_table(found) if random else results_table(found))
        if not (random or loads.ignore_eos):
            show_cut(found)
        if file is not None:
            told = {"rounds": rounds, "interrupted": interrupted, "counted": COUNTED}
            written = {"provenance": provenance(), **told, key_of(random): found}
            file.write_text(json.dumps(written, indent=2) + "\n")
        if drawing is not None:
            draw_sides(found, drawing)
    if interrupted:
        raise KeyboardInterrupt


def key_of(random: bool) -> str:
    """Where figures stand in the JSON: only `results` are what `report` compares."""
    return "costs" if random else "results"


def are_random(entries: Sequence[Entry]) -> bool:
    """Whether the models have random weights; `ValueError` where only some do."""
    kinds = {entry.random for entry in entries}
    if len(kinds) > 1:
        raise ValueError("models of random weights can be compared with their like alone")
    return kinds.pop()


def counts(text: str, name: str) -> list[int]:
    """Numbers from one on, from a list such as `1,4,16`."""
    found = numbers(text, int, name)
    for number in found:
        at_least_one(**{name: number})
    return found


def shapes_in(folder: Path, loading: Loading) -> Shapes:
    """Where checkpoints of random weights will lie."""
    device = resolve_device(loading.device)
    return Shapes(folder=folder, dtype=resolve_dtype(loading.dtype, device), device=device)


def line_up(
    entries: Sequence[Entry],
    loads: Loads,
    asking: Asking,
    questions: Sequence[Question],
    loading: Loading,
    shapes: Shapes,
    *,
    random: bool,
) -> Iterator[Side]:
    """A side for each entry under each load; `ValueError` before anything runs."""
    setting = asking.setting()
    every = loads.all(setting.max_tokens, random=random)
    loaded = [(shapes.model(entry.model), shapes.method(entry.method)) for entry in entries]
    adapted: dict[str | None, list[tuple[str, Method]]] = {}
    for entry, pair in zip(entries, loaded, strict=True):
        adapted.setdefault(entry.adapter, []).append(pair)
    for pairs in adapted.values():
        loading.check(pairs)
    llms = {
        adapter: loading.changed(
            adapter=shapes.model(adapter) if adapter else loading.adapter
        ).open_all(pairs)
        for adapter, pairs in adapted.items()
    }
    for load in every:
        chosen = setting.options(loads.options(load, random=random))
        for entry, (model, method) in zip(entries, loaded, strict=True):
            llm = llms[entry.adapter][model]
            asked, length = questions, load.prompt_length
            if length is not None:
                asked = of_length(llm, questions, length)
            yield Side(
                entry=entry,
                llm=llm,
                load=load,
                questions=asked,
                options=chosen | Options(method=method),
                task="" if length else setting.task,
                protocol="" if length else asking.protocol,
            )


def run(sides: Sequence[Side], rounds: int, samples: Path | None) -> tuple[int, bool]:
    """Measure with a progress bar: how many rounds are whole, and whether Ctrl-C ended it."""
    whole = 0
    with bars() as shown:
        bar = shown.add_task("turns", total=rounds * len(sides))

        def progress(side: Side) -> None:
            shown.update(bar, advance=1, description=side.entry.name)

        try:
            for done in alternate(sides, rounds, samples=samples, progress=progress):
                whole = done
        except KeyboardInterrupt:
            return whole, True
    return whole, False


def varying(found: Sequence[Figures]) -> dict[str, str]:
    """Keys of the loads that differ, and their names in a table."""
    names = {"batch": "batch", "prompt_length": "prompt", "max_tokens": "most\ntokens"}
    return {key: n for key, n in names.items() if len({each[key] for each in found}) > 1}


def table_of(found: Sequence[Figures], columns: Sequence[str]) -> Table:
    """An empty table: number, what varies of the load, and some columns."""
    table = Table(header_style="bold")
    for name in ("", *varying(found).values(), *columns):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def results_table(found: Sequence[Figures]) -> Table:
    """A line for each side, headline metrics of the same run together."""
    speed = "tokens_per_cpu_second" if found[0]["clock"] == "cpu" else "tokens_per_second"
    unit = "CPU s" if found[0]["clock"] == "cpu" else "s"
    columns = ("accuracy\n95 %", "tokens\nper forward", f"tokens\nper {unit}")
    table = table_of(found, (*columns, "p50 s\np95 s", "first\ntext s", "faster\n95 %"))
    for number, each in enumerate(found, 1):
        error = each["tokens_per_forward_error"]
        low, high = each["interval"] or (0, 0)
        scored = each["accuracy"] is not None
        table.add_row(
            str(number),
            *(str(each[key]) for key in varying(found)),
            f"{each['accuracy']:.1%}\n{low:.1%}–{high:.1%}" if scored else "—",
            f"{each['tokens_per_forward']:.2f}" + ("" if error is None else f"\n± {error:.2f}"),
            f"{each[speed]:.0f}",
            f"{each['latency']['p50']:.3f}\n{each['latency']['p95']:.3f}",
            f"{each['first_text']['p50']:.3f}",
            times(each["faster"]),
        )
    return table


def costs_table(found: Sequence[Figures]) -> Table:
    """A line for each side: what forwards cost, and nothing about tokens."""
    clock = found[0]["clock"]
    columns = (f"{clock} ms\nper forward", "ms per pass\np50, p95", "rows\nper pass")
    table = table_of(found, (*columns, "faster\n95 %"))
    for number, each in enumerate(found, 1):
        passes = each["ms_per_pass"]
        table.add_row(
            str(number),
            *(str(each[key]) for key in varying(found)),
            f"{each['ms_per_forward'][clock]:.2f}",
            "\n".join(f"{role} {p['p50']:.2f}, {p['p95']:.2f}" for role, p in passes.items()),
            "\n".join(f"{p['rows']:.1f}" for p in passes.values()),
            times(each["faster"]),
        )
    table.caption = "weights are random: what is accepted, and so speed and accuracy, mean nothing"
    return table


def list_names(found: Sequence[Figures]) -> None:
    """Print what the numbers of a table stand for."""
    for number, each in enumerate(found, 1):
        name = f"{each['line']} {each['setting']}".rstrip()
        console.print(f"{number}  {name}", soft_wrap=True)


def times(faster: Figures | None) -> str:
    """A ratio with its interval."""
    if faster is None:
        return ""
    low, high = faster["interval"] or (None, None)
    return f"{faster['ratio']:.2f} ×" + ("" if low is None else f"\n{low:.2f}–{high:.2f}")
