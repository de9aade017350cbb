"""The command `tune`, which searches for the fastest options of a method."""

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
from outpace.cli.draw import console
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
from outpace.cli.terminal import bars
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
"""Rounds of the final comparison, and the number of settings in it."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Flags of what to optimize, and for how long."""

    max_loss: Annotated[float, Option(help="Maximum loss of accuracy, in percentage points.")] = 1.0
    against: Annotated[
        str | None,
        Option(help="Baseline 'METHOD option=value …'; by default one token per forward."),
    ] = None
    by: Annotated[str, Option(help="Minimize seconds or forwards per token.")] = "seconds"
    trials: Annotated[int, Option(help="Number of settings to try, earlier runs included.")] = 40

    def __post_init__(self) -> None:
        """Raise `OptionError` for an invalid goal."""
        if not (math.isfinite(self.max_loss) and 0 <= self.max_loss <= 100):
            message = f"max_loss must be between 0 and 100 points, got {self.max_loss}"
            raise OptionError("max_loss", self.max_loss, message)
        if self.by not in ("seconds", "forwards"):
            message = f"by must be seconds or forwards, got {self.by!r}"
            raise OptionError("by", self.by, message)
        at_least_one(trials=self.trials)

    def speed(self, llm: LLM) -> str:
        """Return the result key to maximize; CPU seconds count if all runs on a CPU."""
        if self.by == "forwards":
            return "tokens_per_forward"
        return "tokens_per_cpu_second" if llm.device.type == "cpu" else "tokens_per_second"


GOAL = Goal()


def tune(
    model: ModelName,
    method: Mapping[str, Any] | None = None,
    goal: Goal = GOAL,
    task_flags: Asking = ASKING,
    limit: Limit = 100,
    batch: Batch = 1,
    sampling: Choice = CHOICE,
    load_flags: Loading = LOADING,
    samples: Annotated[
        Path | None, Option(help="Append each trial to this file, from which a killed run resumes.")
    ] = None,
    json_path: JsonPath = None,
    png: Annotated[Path | None, Option(help="Plot accuracy against speed to this file.")] = None,
) -> None:
    """Search for the fastest options of a method within a limit on the loss of accuracy.

    Options that are given stay fixed; the others are searched within their declared bounds. The
    fastest settings are measured again, in alternating turns with the baseline.
    """
    from outpace.benchmark.tune import Search, results_of, space_of

    if method is None:
        raise ValueError("--method is required: give the method to tune")
    if png is not None:
        from outpace.benchmark.plots import draw_front
    name, fixed = method["method"], dict(method["options"])
    plain = make_method(name, fixed, spelling=lambda option: f"--{flag(option)}")
    space_of(type(plain), fixed)
    with replaced(json_path) as file, replaced(png) as picture:
        side = against(model, plain, goal, task_flags, limit, batch, sampling, load_flags)
        aim: dict[str, Any] = {
            "max_loss": goal.max_loss,
            "by": goal.speed(side.llm),
            "seed": sampling.seed,
        }
        header = {"tuned": name, "fixed": fixed, **aim, **side.header(1)}
        with kept(samples, header) as records:
            search = Search(
                side=side, name=name, kind=type(plain), fixed=fixed, samples=records, **aim
            )
            run(search, goal.trials)
        results = [search.reference, *results_of(search.trials)]
        final = finals(search)
        show(search, results, final, [*given(task_flags), *given(sampling)])
        if file is not None:
            document = {"provenance": provenance(), "search": header, "results": results}
            file.write_text(json.dumps({**document, "finals": final}, indent=2) + "\n")
        if picture is not None:
            draw_front(results, picture)


def against(
    model: str,
    method: Method,
    goal: Goal,
    task_flags: Asking,
    limit: int,
    batch: int,
    sampling: Choice,
    load_flags: Loading,
) -> Side:
    """Load the baseline of losses; raises `ValueError` if the task has no scoring rule."""
    from outpace.benchmark.tune import careful

    setting, questions = task_flags.setting(), task_flags.questions(limit)
    if batch > len(questions):
        limit = len(questions)
        raise ValueError(f"batch must be at most the number of questions, {limit}, got {batch}")
    if questions[0].score == "none":
        raise ValueError(f"task {setting.task} has no scoring rule: tune on another task")
    baselines = [] if goal.against is None else parse_entries(f"{model} {goal.against}")
    if len(baselines) > 1:
        raise ValueError(f"--against must be a single setting, got {goal.against!r}")
    llm = load_flags.open(model, method, prefix_cache=False)
    plain = careful(llm)
    default = Entry(model=model, method=plain, line=" ".join([model, *flags_of(plain)[1:]]))
    entry = baselines[0] if baselines else default
    llm.pair(entry.method)
    options = setting.options(sampling.options())
    options["method"] = entry.method
    load = Load(batch=batch, max_tokens=options["max_tokens"] or setting.max_tokens)
    protocol = task_flags.protocol
    return Side(
        entry=entry,
        llm=llm,
        load=load,
        questions=questions,
        options=options,
        task=setting.task,
        protocol=protocol,
    )


def run(search: Search, trials: int) -> None:
    """Search with a progress bar."""
    with bars() as shown:
        bar = shown.add_task("one token at a time", total=trials)
        shown.update(bar, description=f"baseline accuracy: {search.reference['accuracy']:.1%}")

        def progress(record: Record) -> None:
            best = search.best(1)
            text = f"best {best[0]['value']:.3g} {search.unit}" if best else "nothing yet"
            shown.update(bar, completed=len(search.trials), description=text)

        search.run(trials, progress)


def finals(search: Search) -> list[Figures]:
    """Compare the fastest settings with the baseline; empty if none is accurate enough."""
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
    search: Search, results: Sequence[Figures], final: Sequence[Figures], more: Sequence[str]
) -> None:
    """Print the Pareto front, the finalists, and the command line of the fastest."""
    table = sorted(fronts(results, search.by), key=lambda number: results[number][search.by])
    front = [{**results[number], "faster": None} for number in table]
    clock = "cpu" if search.side.llm.device.type == "cpu" else "wall"
    console.print(f"Pareto front of {len(results)} settings:")
    list_names(front)
    console.print(results_table([{**each, "clock": clock} for each in front]))
    if not final:
        console.print(
            f"no setting of {len(search.trials)} loses at most {search.max_loss:g} points"
        )
        return
    console.print("the fastest, in alternating turns with the baseline:")
    list_names(final)
    console.print(results_table(final))
    first, *others = final
    ratio = {each["setting"]: each["faster"] and each["faster"]["ratio"] for each in others}
    best = max(search.best(FINALISTS), key=lambda r: ratio[r["result"]["setting"]] or 0.0)
    flags = flags_of(search.entry(best["parameters"]).method)
    words = ["outpace", "evaluate", search.side.entry.model, *flags, *more]
    console.print(shlex.join(words), soft_wrap=True)
