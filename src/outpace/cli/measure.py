"""Commands that measure: `evaluate` and `race`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from outpace.api.answers import Answering
from outpace.api.codec import checked_text
from outpace.api.llm import LLM
from outpace.api.options import Options, check_options
from outpace.cli.asking import ASKING, Asking
from outpace.cli.draw import console, report_table, show_cut, show_pieces
from outpace.cli.flags import (
    ENDING,
    LOADING,
    Batch,
    Choice,
    Dressing,
    Ending,
    JsonPath,
    Limit,
    Loading,
    ModelName,
    NoPrefixCache,
    Template,
    typed,
)
from outpace.cli.options import entry_of, parse_method, split_entry
from outpace.cli.output import replaced
from outpace.cli.spread import SPREAD, Spread
from outpace.cli.tasks import Tasks, show
from outpace.cli.terminal import bars
from outpace.evaluation.protocol import Setting
from outpace.evaluation.question import Question
from outpace.evaluation.report import Report
from outpace.evaluation.run import evaluate, fitted, judged, questions_of
from outpace.methods import Method
from outpace.methods.bounds import at_least_one
from outpace.provenance import provenance

RACE = (
    "tiny-ar autoregressive",
    "tiny-ar dflash draft=tiny-dflash",
    "tiny-wedlm wedlm verify=true",
    "tiny-dream left_to_right tokens=1 window=16 lookahead=16",
    "tiny-dream left_to_right tokens=4 window=16 lookahead=16",
    "tiny-dream apd verifier=tiny-aux ratio=0.5 window=16 lookahead=16",
    "tiny-d2f d2f add=0.5 confidence=0.98",
)

MEANING = (
    "Tokens per forward: gain of the method. Tokens per second: resulting speed on this machine."
)

RACING = Choice(max_tokens=128, temperature=0.0)


def race(
    prompt: Annotated[
        str | None,
        Argument(help="The prompt, or - for standard input; by default story problems."),
    ] = None,
    entry: Annotated[
        list[str] | None, Option(help="'MODEL METHOD option=value …'; repeat for each entry.")
    ] = None,
    limit: Limit = 25,
    sampling: Choice = RACING,
    stops: Ending = ENDING,
    template: Template = None,
    load_flags: Loading = LOADING,
    json_path: JsonPath = None,
) -> None:
    """Compare methods on the same prompts: answers coloured by forward, then a table.

    Without a prompt, the methods solve held-out story problems, and the table includes accuracy.
    """
    options = sampling.options() | stops.options() | Dressing(template=template).options()
    check_options(options)
    prompt = None if prompt is None else typed(prompt)
    with replaced(json_path) as file:
        racers = line_up(entry or RACE, load_flags)
        reports = compete(racers, prompt, limit, options)
        console.print()
        console.print(report_table(reports, scored=prompt is None))
        show_cut([report.summary() for _, report in reports])
        if prompt is None:
            note = f"{limit} held-out story problems (not GSM8K), one at a time"
            console.print(note, style="dim")
        console.print(MEANING, style="dim")
        write_json(file, [report for _, report in reports])


Racers = dict[str, tuple[LLM, Method]]
"""Model and method of each entry."""


def compete(
    racers: Racers, prompt: str | None, limit: int, options: Options
) -> list[tuple[str, Report]]:
    """Show the answer of each entry, and report on that prompt or on story problems."""
    questions = questions_of("story", limit)
    first = questions[0].prompt if prompt is None else checked_text("prompt", prompt)
    console.print(first, style="bold")
    reports: list[tuple[str, Report]] = []
    for title, (llm, method) in racers.items():
        options["method"] = method
        if prompt is not None:
            llm.generate(first, **options)  # warm-up; an evaluation has its own
        console.print(f"\n{title}", style="bold underline")
        stream = llm.stream(first, **options)
        show_pieces(console, stream)
        if prompt is None:
            reports.append((title, run(llm, questions, {"task": "story"}, 1, options)))
        else:
            assert stream.output is not None
            seconds = stream.output.seconds
            report = Report(task="", model=llm.name, method=repr(method), batch=1, seconds=seconds)
            report.add(stream.output, None)
            reports.append((title, report))
    return reports


def line_up(entries: Sequence[str], load_flags: Loading) -> Racers:
    """Load model and method of all entries; raises `ValueError` for a bad one before any runs."""
    parsed = {text: parse_entry(text) for text in entries}
    llms = load_flags.open_all(parsed.values())
    return {text: (llms[model], method) for text, (model, method) in parsed.items()}


def parse_entry(text: str) -> tuple[str, Method]:
    """Parse model and method of an entry."""
    model, name, options = split_entry(text)
    return model, parse_method(name, options)


def run(
    llm: Answering,
    questions: list[Question],
    labels: dict[str, str],
    batch: int,
    options: Options,
    samples: Path | None = None,
) -> Report:
    """Evaluate with a progress bar."""
    with bars() as shown:
        bar = shown.add_task(labels["task"], total=len(questions))

        def progress(report: Report) -> None:
            text = f"{report.tokens_per_forward:.2f} tokens per forward"
            shown.update(bar, completed=len(report.outputs), description=text)

        return evaluate(
            llm, questions, batch=batch, samples=samples, progress=progress, **labels, **options
        )


HARNESS = Tasks()


@dataclass(frozen=True, kw_only=True)
class Questioned(Choice):
    """Flags of sampling and length whose defaults come from a protocol."""

    max_tokens: Annotated[
        int | None,
        Option(help="Maximum number of tokens of an answer.", show_default="by protocol"),
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            help="Sampling temperature; 0 is greedy.", show_default="by protocol, method or family"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            help="Probability mass of nucleus sampling.",
            show_default="by protocol, method or family",
        ),
    ] = None


QUESTIONED = Questioned()


def evaluate_command(
    model: ModelName,
    method: Method | None = None,
    task_flags: Asking = ASKING,
    limit: Limit = 100,
    batch: Batch = 1,
    sampling: Questioned = QUESTIONED,
    stops: Ending = ENDING,
    template: Template = None,
    load_flags: Loading = LOADING,
    replica_flags: Spread = SPREAD,
    harness: Tasks = HARNESS,
    no_prefix_cache: NoPrefixCache = False,
    samples: Annotated[
        Path | None,
        Option(help="Append each answer to this file, from which a killed run resumes."),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Measure accuracy, tokens per forward and tokens per second of one method, all in one run.

    A protocol sets shots, template, lengths, sampling and method as in a paper; flags override it.
    With --json, all answers are written to a JSON-lines file next to the figures.
    """
    at_least_one(limit=limit)
    request = sampling.options() | stops.options()
    if template:
        request |= Dressing(template=template).options()
    check_options(request)
    if harness.tasks is not None:
        if replace(task_flags, num_shots=None) != ASKING:
            raise ValueError("--tasks cannot be combined with --task, --data and related flags")
        if replica_flags != SPREAD:
            raise ValueError("--tasks cannot be combined with --ray or --replicas")
        with replaced(json_path) as file:
            llm = load_flags.open(model, method, prefix_cache=not no_prefix_cache)
            extra = {"shots": task_flags.num_shots, "limit": limit, "samples": samples}
            report_tasks(harness, llm, file, options=request, batch=batch, **extra)
        return
    if harness != HARNESS:
        raise ValueError("--include, --chat, --system and --draws need --tasks")
    setting, questions = task_flags.setting(), task_flags.questions(limit)
    options = setting.options(request | Options(method=method))
    with replaced(json_path) as file, replaced(beside(json_path)) as answers:
        cached = not no_prefix_cache
        backend = replica_flags.open(load_flags, model, options["method"], prefix_cache=cached)
        options = settled(backend, setting, questions, request)
        labels = {"task": setting.task, "protocol": task_flags.protocol}
        report = run(backend, questions, labels, batch, options, samples)
        console.print(report_table([(entry_of(backend.name, backend.method), report)], scored=True))
        show_cut([report.summary()])
        write_json(file, [report])
        write_answers(answers, questions, report)


def report_tasks(harness: Tasks, llm: LLM, path: Path | None, **settings: Any) -> None:
    """Run the tasks of lm-evaluation-harness, and print and write their results."""
    results, report = harness.run(llm, **settings)
    show(results)
    show_cut([report.summary()])
    write_json(path, [report], harness=results)


def write_answers(path: Path | None, questions: list[Question], report: Report) -> None:
    """Write each question with its answer, if there is a file."""
    if path is not None:
        lines = (json.dumps(line, default=str) for line in judged(questions, report))
        path.write_text("".join(f"{line}\n" for line in lines))


def settled(
    llm: Answering, setting: Setting, questions: list[Question], request: Options
) -> Options:
    """Return the options of all requests; the lengths of a protocol are reduced to the context."""
    options = setting.options(request | Options(method=llm.method))
    if isinstance(llm, LLM) and "max_tokens" not in request:
        options = fitted(llm, questions, options)
    return options


def beside(path: Path | None) -> Path | None:
    """Return the path of the answers that belong to the figures at `path`."""
    return None if path is None else path.with_name(f"{path.stem}.answers.jsonl")


def write_json(path: Path | None, reports: list[Report], **more: Any) -> None:
    """Write figures with their provenance, and any `more` fields."""
    if path is not None:
        results = [report.summary() for report in reports]
        text = json.dumps({"provenance": provenance(), "results": results, **more}, indent=2)
        path.write_text(text + "\n")
