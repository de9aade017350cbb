"""The command that looks for the fastest options: `tune`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from outpace.api.llm import LLM
from outpace.benchmark.entry import Entry
from outpace.benchmark.side import Load, Side, alternate
from outpace.benchmark.summary import Figures, summaries
from outpace.cli.asking import ASKING, Asking
from outpace.cli.draw import bars, console
from outpace.cli.flags import (
    CHOICE,
    LOADING,
    Batch,
    Choice,
    JsonPath,
    Limit,
    Loading,
    ModelName,
)
from outpace.cli.options import flag, flags_of, given, parse_entries
from outpace.cli.output import replaced
from outpace.cli.sides import list_names, results_table
from outpace.errors import OptionError
from outpace.evaluation.compare import fronts
from outpace.evaluation.samples import kept
from outpace.methods import Method
from outpace.methods.bounds import at_least_one
from outpace.methods.options import make_method
from outpace.provenance import provenance

if TYPE_CHECKING:
    from outpace.benchmark.tune import Search
    from outpace.jsonl import Record

ROUNDS, FINALISTS = 5, 3
"""Turns of the last comparison, and how many of the fastest are in it."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is looked for, and for how long."""

    max_loss: Annotated[float, Option(help="Points of percent of accuracy that may be lost.")] = 1.0
    against: Annotated[
        str | None,
        Option(help="'METHOD option=value …' to lose against; one token per forward if none."),
    ] = None
    by: Annotated[str, Option(help="What a token is to take few of: seconds or forwards.")] = (
        "seconds"
    )
    trials: Annotated[int, Option(help="Settings to try, those of earlier runs included.")] = 40

    def __post_init__(self) -> None:
        """Raise `ValueError` for a goal that is none."""
        if not (math.isfinite(self.max_loss) and 0 <= self.max_loss <= 100):
            message = f"max_loss must lie between 0 and 100 points, not {self.max_loss}"
            raise OptionError("max_loss", self.max_loss, message)
        if self.by not in ("seconds", "forwards"):
            message = f"by must be seconds or forwards, not {self.by!r}"
            raise OptionError("by", self.by, message)
        at_least_one(trials=self.trials)

    def speed(self, llm: LLM) -> str:
        """Key of a result that is to be large; CPU seconds count where all runs on a CPU."""
        if self.by == "forwards":
            return "tokens_per_forward"
        return "tokens_per_cpu_second" if llm.device.type == "cpu" else "tokens_per_second"


GOAL = Goal()


def tune(
    model: ModelName,
    method: Mapping[str, Any] | None = None,
    goal: Goal = GOAL,
    asking: Asking = ASKING,
    limit: Limit = 100,
    batch: Batch = 1,
    choice: Choice = CHOICE,
    loading: Loading = LOADING,
    samples: Annotated[
        Path | None, Option(help="Add each trial to this file; a killed run goes on from it.")
    ] = None,
    json_path: JsonPath = None,
    png: Annotated[Path | None, Option(help="Draw accuracy against speed to this file.")] = None,
) -> None:
    """The fastest options of a method that lose no more accuracy than is allowed.

    Options that are given stay, the others are searched within the bounds that stand beside them.
    The fastest few are measured again, in turns with what they may lose against.
    """
    from outpace.benchmark.tune import Search, results_of, space_of

    if method is None:
        raise ValueError("say with --method what is to be tuned")
    if png is not None:
        from outpace.benchmark.plots import draw_front
    name, fixed = method["method"], dict(method["options"])
    plain = make_method(name, fixed, spelling=lambda option: f"--{flag(option)}")
    space_of(type(plain), fixed)
    with replaced(json_path) as file, replaced(png) as picture:
        side = against(model, plain, goal, asking, limit, batch, choice, loading)
        aim: dict[str, Any] = {
            "max_loss": goal.max_loss,
            "by": goal.speed(side.llm),
            "seed": choice.seed,
        }
        header = {"tuned": name, "fixed": fixed, **aim, **side.header(1)}
        with kept(samples, header) as records:
            search = Search(
                side=side, name=name, kind=type(plain), fixed=fixed, samples=records, **aim
            )
            run(search, goal.trials)
        found = [search.reference, *results_of(search.trials)]
        final = finals(search)
        show(search, found, final, [*given(asking), *given(choice)])
        if file is not None:
            written = {"provenance": provenance(), "search": header, "results": found}
            file.write_text(json.dumps({**written, "finals": final}, indent=2) + "\n")
        if picture is not None:
            draw_front(found, picture)


def against(
    model: str,
    method: Method,
    goal: Goal,
    asking: Asking,
    limit: int,
    batch: int,
    choice: Choice,
    loading: Loading,
) -> Side:
    """What a loss counts against, ready to answer; `ValueError` where nobody judges it."""
    from outpace.benchmark.tune import careful

    asked, questions = asking.setting(), asking.questions(limit)
    if batch > len(questions):
        raise ValueError(f"{len(questions)} questions do not fill a batch of {batch}")
    if questions[0].score == "none":
        raise ValueError(f"nobody judges answers of {asked.task}: tune on another task")
    named = [] if goal.against is None else parse_entries(f"{model} {goal.against}")
    if len(named) > 1:
        raise ValueError(f"one setting is to lose against, not {goal.against!r}")
    llm = loading.open(model, method, prefix_cache=False)
    plain = careful(llm)
    usual = Entry(model=model, method=plain, line=" ".join([model, *flags_of(plain)[1:]]))
    entry = named[0] if named else usual
    llm.pair(entry.method)
    options = asked.options(choice.options())
    options["method"] = entry.method
    load = Load(batch=batch, max_tokens=options["max_tokens"] or asked.max_tokens)
    protocol = asking.protocol
    return Side(
        entry=entry,
        llm=llm,
        load=load,
        questions=questions,
        options=options,
        task=asked.task,
        protocol=protocol,
    )


def run(search: Search, trials: int) -> None:
    """Search with a progress bar."""
    with bars() as shown:
        bar = shown.add_task("one token at a time", total=trials)
        shown.update(bar, description=f"accuracy to keep: {search.reference['accuracy']:.1%}")

        def progress(record: Record) -> None:
            best = search.best(1)
            text = f"best {best[0]['value']:.3g} {search.unit}" if best else "nothing yet"
            shown.update(bar, completed=len(search.trials), description=text)

        search.run(trials, progress)


def finals(search: Search) -> list[Figures]:
    """The fastest few in turns with what they may lose against; nothing where none keeps it."""
    best = search.best(FINALISTS)
    if not best:
        return []
    entries = [search.side.entry, *(search.entry(record["parameters"]) for record in best)]
    sides = [search.side_of(entry) for entry in entries]
    rounds = min(ROUNDS, len(search.side.questions) // search.side.load.batch)
    for _ in alternate(sides, rounds):
        pass
    return summaries(sides, rounds)


def show(
    search: Search, found: Sequence[Figures], final: Sequence[Figures], more: Sequence[str]
) -> None:
    """Print the front of what was seen, the finals, and the command line of the fastest."""
    table = sorted(fronts(found, search.by), key=lambda number: found[number][search.by])
    seen = [{**found[number], "faster": None} for number in table]
    clock = "cpu" if search.side.llm.device.type == "cpu" else "wall"
    console.print(f"what no other of {len(found)} settings beats:")
    list_names(seen)
    console.print(results_table([{**each, "clock": clock} for each in seen]))
    if not final:
        console.print(
            f"none of {len(search.trials)} settings loses at most {search.max_loss:g} points"
        )
        return
    console.print("the fastest, in turns with what a loss counts against:")
    list_names(final)
    console.print(results_table(final))
    first, *others = final
    ratio = {each["setting"]: each["faster"] and each["faster"]["ratio"] for each in others}
    best = max(search.best(FINALISTS), key=lambda r: ratio[r["result"]["setting"]] or 0.0)
    flags = flags_of(search.entry(best["parameters"]).method)
    words = ["outpace", "evaluate", search.side.entry.model, *flags, *more]
    console.print(shlex.join(words), soft_wrap=True)
