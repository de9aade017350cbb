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
from outpace.api.options import Options
from outpace.benchmark.entry import MethodEntry
from outpace.benchmark.side import RequestLoad, Side, SideFigures, alternate_turns, summarise_sides
from outpace.cli.draw import console, replace_file
from outpace.cli.flags import (
    LOAD_FLAGS,
    SAMPLING_FLAGS,
    BatchFlag,
    JsonFlag,
    LimitFlag,
    LoadFlags,
    ModelArgument,
    SamplingFlags,
)
from outpace.cli.options import changed_flags, flag_name, method_flags, parse_entries
from outpace.cli.sides import print_names, results_table
from outpace.cli.task_flags import TASK_FLAGS, TaskFlags
from outpace.cli.terminal import progress_bars
from outpace.errors import OptionError
from outpace.evaluation.compare import pareto_indices
from outpace.evaluation.run import resolve_options
from outpace.evaluation.samples import resume_samples
from outpace.methods import Method
from outpace.methods.method import check_at_least_one
from outpace.methods.options import make_method
from outpace.provenance import provenance_record

if TYPE_CHECKING:
    from outpace.benchmark.tune import TuningSearch
    from outpace.jsonl import JsonRecord

FINAL_ROUNDS, NUM_FINALISTS = 5, 3
"""Rounds of the final comparison, and the number of settings in it."""


@dataclass(frozen=True, kw_only=True)
class TuningGoal:
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
        check_at_least_one(trials=self.trials)

    def speed_key(self, llm: LLM) -> str:
        """Return the result key to maximize; CPU seconds count if all runs on a CPU."""
        if self.by == "forwards":
            return "tokens_per_forward"
        return "tokens_per_cpu_second" if llm.device.type == "cpu" else "tokens_per_second"


TUNING_GOAL = TuningGoal()


def tune(
    model: ModelArgument,
    method: Mapping[str, Any] | None = None,
    goal: TuningGoal = TUNING_GOAL,
    task_flags: TaskFlags = TASK_FLAGS,
    limit: LimitFlag = 100,
    batch: BatchFlag = 1,
    sampling: SamplingFlags = SAMPLING_FLAGS,
    load_flags: LoadFlags = LOAD_FLAGS,
    samples: Annotated[
        Path | None, Option(help="Append each trial to this file, from which a killed run resumes.")
    ] = None,
    json_path: JsonFlag = None,
    png: Annotated[Path | None, Option(help="Plot accuracy against speed to this file.")] = None,
) -> None:
    """Search for the fastest options of a method within a limit on the loss of accuracy.

    Options that are given stay fixed; the others are searched within their declared bounds. The
    fastest settings are measured again, in alternating turns with the baseline.
    """
    from outpace.benchmark.tune import TuningSearch, search_space, trial_results

    if method is None:
        raise ValueError("--method is required: give the method to tune")
    if png is not None:
        from outpace.benchmark.plots import draw_front
    name, fixed = method["method"], dict(method["options"])
    plain = make_method(name, fixed, spelling=lambda option: f"--{flag_name(option)}")
    search_space(type(plain), fixed)
    with replace_file(json_path) as file, replace_file(png) as picture:
        side = build_baseline(model, plain, goal, task_flags, limit, batch, sampling, load_flags)
        aim: dict[str, Any] = {
            "max_loss": goal.max_loss,
            "by": goal.speed_key(side.llm),
            "seed": sampling.seed,
        }
        header = {"tuned": name, "fixed": fixed, **aim, **side.resume_header(1)}
        with resume_samples(samples, header) as records:
            search = TuningSearch(
                side=side, name=name, kind=type(plain), fixed=fixed, samples=records, **aim
            )
            run_search(search, goal.trials)
        results = [search.reference_result, *trial_results(search.trials)]
        final = compare_finalists(search)
        show_search(search, results, final, [*changed_flags(task_flags), *changed_flags(sampling)])
        if file is not None:
            document = {"provenance": provenance_record(), "search": header, "results": results}
            file.write_text(json.dumps({**document, "finals": final}, indent=2) + "\n")
        if picture is not None:
            draw_front(results, picture)


def build_baseline(
    model: str,
    method: Method,
    goal: TuningGoal,
    task_flags: TaskFlags,
    limit: int,
    batch: int,
    sampling: SamplingFlags,
    load_flags: LoadFlags,
) -> Side:
    """Load the baseline of losses; raises `ValueError` if the task has no scoring rule."""
    from outpace.benchmark.tune import reference_method

    setting, questions = task_flags.load_setting(), task_flags.load_questions(limit)
    if batch > len(questions):
        limit = len(questions)
        raise ValueError(f"batch must be at most the number of questions, {limit}, got {batch}")
    if questions[0].score == "none":
        raise ValueError(f"task {setting.task} has no scoring rule: tune on another task")
    baselines = [] if goal.against is None else parse_entries(f"{model} {goal.against}")
    if len(baselines) > 1:
        raise ValueError(f"--against must be a single setting, got {goal.against!r}")
    llm = load_flags.open_model(model, method, prefix_cache=False)
    plain = reference_method(llm)
    default = MethodEntry(
        model=model, method=plain, line=" ".join([model, *method_flags(plain)[1:]])
    )
    entry = baselines[0] if baselines else default
    llm.pair(entry.method)
    request = sampling.options() | Options(method=entry.method)
    options = resolve_options(llm, setting, questions, request)
    load = RequestLoad(batch=batch, max_tokens=sampling.max_tokens)
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


def run_search(search: TuningSearch, trials: int) -> None:
    """Search with a progress bar."""
    with progress_bars() as shown:
        bar = shown.add_task("one token at a time", total=trials)
        shown.update(
            bar, description=f"baseline accuracy: {search.reference_result['accuracy']:.1%}"
        )

        def update_bar(record: JsonRecord) -> None:
            best = search.best_trials(1)
            text = f"best {best[0]['value']:.3g} {search.unit}" if best else "nothing yet"
            shown.update(bar, completed=len(search.trials), description=text)

        search.run_trials(trials, update_bar)


def compare_finalists(search: TuningSearch) -> list[SideFigures]:
    """Compare the fastest settings with the baseline; empty if none is accurate enough."""
    best = search.best_trials(NUM_FINALISTS)
    if not best:
        return []
    entries = [search.side.entry, *(search.build_entry(record["parameters"]) for record in best)]
    sides = [search.build_side(entry) for entry in entries]
    rounds = min(FINAL_ROUNDS, len(search.side.questions) // search.side.load.batch)
    for _ in alternate_turns(sides, rounds):
        pass
    return summarise_sides(sides, rounds)


def show_search(
    search: TuningSearch,
    results: Sequence[SideFigures],
    final: Sequence[SideFigures],
    more: Sequence[str],
) -> None:
    """Print the Pareto front, the finalists, and the command line of the fastest."""
    table = sorted(
        pareto_indices(results, search.by), key=lambda number: results[number][search.by]
    )
    front = [{**results[number], "faster": None} for number in table]
    clock = "cpu" if search.side.llm.device.type == "cpu" else "wall"
    console.print(f"Pareto front of {len(results)} settings:")
    print_names(front)
    console.print(results_table([{**each, "clock": clock} for each in front]))
    if not final:
        console.print(
            f"no setting of {len(search.trials)} loses at most {search.max_loss:g} points"
        )
        return
    console.print("the fastest, in alternating turns with the baseline:")
    print_names(final)
    console.print(results_table(final))
    first, *others = final
    ratio = {each["setting"]: each["faster"] and each["faster"]["ratio"] for each in others}
    best = max(
        search.best_trials(NUM_FINALISTS), key=lambda r: ratio[r["result"]["setting"]] or 0.0
    )
    flags = method_flags(search.build_entry(best["parameters"]).method)
    words = ["outpace", "evaluate", search.side.entry.model, *flags, *more]
    console.print(shlex.join(words), soft_wrap=True)
