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
from outpace.cli.draw import bars, console, report_table, show_cut, show_pieces
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
    "Tokens per forward: what a pass of the model brings. Per second: what that is worth here."
)

RACING = Choice(max_tokens=128, temperature=0.0)


def race(
    prompt: Annotated[
        str | None,
        Argument(help="What to answer, - for standard input; story problems where none is given."),
    ] = None,
    entry: Annotated[
        list[str] | None, Option(help="'MODEL METHOD option=value …', once for each racer.")
    ] = None,
    limit: Limit = 25,
    choice: Choice = RACING,
    ending: Ending = ENDING,
    template: Template = None,
    loading: Loading = LOADING,
    json_path: JsonPath = None,
) -> None:
    """Several methods on the same prompts: answers coloured by forward, then one table.

    Without a prompt they solve held-out story problems, so that the table has an accuracy.
    """
    options = choice.options() | ending.options() | Dressing(template=template).options()
    check_options(options)
    prompt = None if prompt is None else typed(prompt)
    with replaced(json_path) as file:
        racers = line_up(entry or RACE, loading)
        reports = compete(racers, prompt, limit, options)
        console.print()
        console.print(report_table(reports, scored=prompt is None))
        show_cut([report.summary() for _, report in reports])
        if prompt is None:
            told = f"{limit} held-out story problems (not GSM8K), one at a time"
            console.print(told, style="dim")
        console.print(MEANING, style="dim")
        write_json(file, [report for _, report in reports])


Racers = dict[str, tuple[LLM, Method]]


def compete(
    racers: Racers, prompt: str | None, limit: int, options: Options
) -> list[tuple[str, Report]]:
    """Show the answer of each racer; what it did on that prompt, or on story problems."""
    questions = questions_of("story", limit)
    first = questions[0].prompt if prompt is None else checked_text("prompt", prompt)
    console.print(first, style="bold")
    reports: list[tuple[str, Report]] = []
    for title, (llm, method) in racers.items():
        options["method"] = method
        if prompt is not None:
            llm.generate(first, **options)  # a warm-up, as an evaluation has its own
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


def line_up(entries: Sequence[str], loading: Loading) -> Racers:
    """Model and method of each racer; `ValueError` for a bad one before any of them runs."""
    parsed = {text: parse_entry(text) for text in entries}
    llms = loading.open_all(parsed.values())
    return {text: (llms[model], method) for text, (model, method) in parsed.items()}


def parse_entry(text: str) -> tuple[str, Method]:
    """Model and method of a racer."""
    model, name, options = split_entry(text)
    return model, parse_method(name, options)


def run(
    llm: Answering,
    questions: list[Question],
    named: dict[str, str],
    batch: int,
    options: Options,
    samples: Path | None = None,
) -> Report:
    """Evaluate with a progress bar."""
    with bars() as shown:
        bar = shown.add_task(named["task"], total=len(questions))

        def progress(report: Report) -> None:
            text = f"{report.tokens_per_forward:.2f} tokens per forward"
            shown.update(bar, completed=len(report.outputs), description=text)

        return evaluate(
            llm, questions, batch=batch, samples=samples, progress=progress, **named, **options
        )


HARNESS = Tasks()


@dataclass(frozen=True, kw_only=True)
class Questioned(Choice):
    """How tokens of answers are chosen where a protocol has a say."""

    max_tokens: Annotated[
        int | None, Option(help="Most tokens of an answer.", show_default="by protocol")
    ] = None
    temperature: Annotated[
        float | None, Option(help="0 is greedy.", show_default="by protocol, method or family")
    ] = None
    top_p: Annotated[
        float | None,
        Option(help="Mass of the nucleus.", show_default="by protocol, method or family"),
    ] = None


QUESTIONED = Questioned()


def evaluate_command(
    model: ModelName,
    method: Method | None = None,
    asking: Asking = ASKING,
    limit: Limit = 100,
    batch: Batch = 1,
    choice: Questioned = QUESTIONED,
    ending: Ending = ENDING,
    template: Template = None,
    loading: Loading = LOADING,
    spread: Spread = SPREAD,
    harness: Tasks = HARNESS,
    no_prefix_cache: NoPrefixCache = False,
    samples: Annotated[
        Path | None, Option(help="Add each answer to this file; a killed run goes on from it.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Accuracy, tokens per forward and tokens per second of one method, from the same run.

    A protocol brings shots, template, lengths, sampling and method of a paper; what is given here
    takes their place. Beside the figures of --json stand all answers, in a file of JSON lines.
    """
    at_least_one(limit=limit)
    asked_for = choice.options() | ending.options()
    if template:
        asked_for |= Dressing(template=template).options()
    check_options(asked_for)
    if harness.tasks is not None:
        if replace(asking, num_shots=None) != ASKING:
            raise ValueError("--tasks bring their own questions: leave --task, --data … out")
        if spread != SPREAD:
            raise ValueError("--tasks are asked here: leave --ray and --replicas out")
        with replaced(json_path) as file:
            llm = loading.open(model, method, prefix_cache=not no_prefix_cache)
            few: dict[str, Any] = {"shots": asking.num_shots, "limit": limit, "samples": samples}
            results, report = harness.run(llm, options=asked_for, batch=batch, **few)
            show(results)
            show_cut([report.summary()])
            write_json(file, [report], harness=results)
        return
    if harness != HARNESS:
        raise ValueError("--include, --chat, --system and --draws go with --tasks")
    asked, questions = asking.setting(), asking.questions(limit)
    options = asked.options(asked_for | Options(method=method))
    with replaced(json_path) as file, replaced(beside(json_path)) as answers:
        cached = not no_prefix_cache
        by = spread.open(loading, model, options["method"], prefix_cache=cached)
        options = settled(by, asked, questions, asked_for)
        named = {"task": asked.task, "protocol": asking.protocol}
        report = run(by, questions, named, batch, options, samples)
        console.print(report_table([(entry_of(by.name, by.method), report)], scored=True))
        show_cut([report.summary()])
        write_json(file, [report])
        write_answers(answers, questions, report)


def write_answers(path: Path | None, questions: list[Question], report: Report) -> None:
    """Write each question with its answer, where there is a file for them."""
    if path is not None:
        lines = (json.dumps(line, default=str) for line in judged(questions, report))
        path.write_text("".join(f"{line}\n" for line in lines))


def settled(by: Answering, asked: Setting, questions: list[Question], given: Options) -> Options:
    """Options of all requests, once the method is known; lengths of a protocol fit the context."""
    options = asked.options(given | Options(method=by.method))
    if isinstance(by, LLM) and "max_tokens" not in given:
        options = fitted(by, questions, options)
    return options


def beside(path: Path | None) -> Path | None:
    """Where the answers stand that the figures at `path` are of; None for None."""
    return None if path is None else path.with_name(f"{path.stem}.answers.jsonl")


def write_json(path: Path | None, reports: list[Report], **more: Any) -> None:
    """Write figures with their provenance, and whatever `more` names."""
    if path is not None:
        results = [report.summary() for report in reports]
        text = json.dumps({"provenance": provenance(), "results": results, **more}, indent=2)
        path.write_text(text + "\n")
