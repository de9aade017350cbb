"""Commands that measure: `evaluate` and `race`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from outpace.api.options import Options, check_options
from outpace.cli.draw import console, replace_file, show_pieces
from outpace.cli.flags import (
    LOAD_FLAGS,
    SAMPLING_FLAGS,
    STOP_FLAGS,
    BatchFlag,
    JsonFlag,
    LimitFlag,
    LoadFlags,
    ModelArgument,
    NoPrefixCacheFlag,
    PromptFlags,
    SamplingFlags,
    StopFlags,
    TemplateFlag,
    read_prompt,
)
from outpace.cli.options import MethodFlag
from outpace.cli.terminal import ProgressBars
from outpace.errors import OptionError
from outpace.field_types import check_at_least_one
from outpace.lab.commands.benchmark_methods import check_complete, measure_sides
from outpace.lab.commands.report import comparison_table, show_truncated
from outpace.lab.commands.task_flags import TASK_FLAGS, TaskFlags
from outpace.lab.protocol import Question
from outpace.provenance import provenance_record

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.lab.report import EvaluationReport
    from outpace.lab.side import Side


@dataclass(frozen=True, kw_only=True)
class HarnessFlags:
    """Flags of the tasks, and of their prompts."""

    tasks: Annotated[
        str | None, Option(help="Tasks of lm-evaluation-harness, separated by commas.")
    ] = None
    include: Annotated[str | None, Option(help="Folder with custom tasks.")] = None
    chat: Annotated[
        bool, Option("--chat", help="Apply the chat template to the prompts of --tasks.")
    ] = False
    draws: Annotated[
        int,
        Option(
            help="Random masks per likelihood of a diffusion model; 0: exact, from left to right."
        ),
    ] = 128

    def run_harness(
        self,
        llm: LLM,
        *,
        options: Options,
        batch: int,
        task_flags: TaskFlags,
        limit: int,
        samples: Path | None,
    ) -> tuple[dict[str, Any], EvaluationReport]:
        """Run the tasks; returns the harness's results, and the report of decoding."""
        from outpace.lab.harness import OutpaceHarness, request_key, run_tasks
        from outpace.lab.report import EvaluationReport

        assert self.tasks is not None
        allowed = ("max_tokens", "seed", "temperature", "top_p")
        if extra := [name for name in options if name not in allowed]:
            raise OptionError(extra[0], dict(options)[extra[0]], "cannot be set: the task sets it")
        harness = OutpaceHarness(
            llm,
            batch_size=batch,
            max_tokens=options.get("max_tokens") or 256,
            seed=options.get("seed", 0),
            draws=self.draws,
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            template=task_flags.variables(),
            samples=samples,
        )
        results = run_tasks(
            harness,
            [name.strip() for name in self.tasks.split(",")],
            include=self.include,
            shots=task_flags.num_shots,
            limit=limit,
            chat=self.chat,
            system=task_flags.system,
        )
        report = EvaluationReport(
            task=self.tasks, model=llm.name, method=repr(llm.method), batch=batch
        )
        report.outputs, report.seconds = harness.outputs, harness.seconds
        report.questions = request_key("questions", harness.questions)
        report.verdicts = [None] * len(harness.outputs)
        return results, report


def show_harness_results(results: Mapping[str, Any]) -> None:
    table = Table(header_style="bold")
    for name in ("task", "metric", "value"):
        table.add_column(name)
    for task, figures in results["results"].items():
        for metric, value in figures.items():
            if isinstance(value, float) and not metric.startswith("sample"):
                table.add_row(task, metric.removesuffix(",none"), f"{value:.4f}")
    console.print(table)


RACE_ENTRIES = (
    "tiny-ar autoregressive",
    "tiny-ar dflash draft=tiny-dflash",
    "tiny-wedlm wedlm verify=true",
    "tiny-dream left_to_right tokens=1 window=16 lookahead=16",
    "tiny-dream left_to_right tokens=4 window=16 lookahead=16",
    "tiny-dream apd verifier=tiny-aux ratio=0.5 window=16 lookahead=16",
    "tiny-d2f d2f add=0.5 confidence=0.98",
)

RACE_SAMPLING = SamplingFlags(max_tokens=128, temperature=0.0)


def race(
    prompt: Annotated[
        str | None, Argument(help="The prompt, or - for standard input; by default story problems.")
    ] = None,
    entry: Annotated[
        list[str] | None,
        Option(help="'MODEL METHOD option=value …', or MODEL alone; repeat for each entry."),
    ] = None,
    limit: LimitFlag = 25,
    rounds: Annotated[int, Option(help="Number of turns per entry, in alternating order.")] = 5,
    sampling: SamplingFlags = RACE_SAMPLING,
    stops: StopFlags = STOP_FLAGS,
    template: TemplateFlag = None,
    load_flags: LoadFlags = LOAD_FLAGS,
    json_path: JsonFlag = None,
) -> None:
    """Compare methods on the same prompts: answers coloured by forward, then a table of turns.

    Without a prompt, the methods solve held-out story problems, and the table includes accuracy.
    The last column is the median over the turns of the speed relative to the first entry.
    """
    from outpace.api.codec import validate_text
    from outpace.lab.run import questions_of

    options = sampling.options() | stops.options() | PromptFlags(template=template).options()
    check_options(options)
    check_at_least_one(rounds=rounds)
    prompt = None if prompt is None else validate_text("prompt", read_prompt(prompt))
    questions = questions_of("story", limit)
    if prompt is not None:
        questions = [Question(prompt, None, "none")] * rounds
    rounds = min(rounds, len(questions))
    with replace_file(json_path) as file:
        sides = open_racers(entry or RACE_ENTRIES, load_flags, questions, options)
        show_answers(sides)
        results = measure_sides(sides, rounds, file, warm_up=False)
        show_truncated(results)
        if prompt is None:
            note = f"{limit} held-out story problems (not GSM8K), one at a time"
            console.print(note, style="dim")
    check_complete(sides, rounds)


def open_racers(
    entries: Sequence[str], load_flags: LoadFlags, questions: Sequence[Question], options: Options
) -> list[Side]:
    from outpace.lab.entry import parse_entries
    from outpace.lab.side import RequestLoad, Side

    parsed = [each for text in entries for each in parse_entries(text, load_flags.adapter)]
    llms = load_flags.open_models((each.model, each.method) for each in parsed)
    task = "" if questions[0].reference is None else "story"
    load = RequestLoad(batch=1, max_tokens=options["max_tokens"])
    return [
        Side(
            entry=each,
            llm=llms[each.model],
            load=load,
            questions=questions,
            options=options | Options(method=each.method),
            task=task,
        )
        for each in parsed
    ]


def show_answers(sides: Sequence[Side]) -> None:
    """Show the answer of each entry to the first question, which warms it up."""
    first = sides[0].questions[0].prompt
    console.print(first, style="bold")
    for side in sides:
        console.print(f"\n{side.entry.name}", style="bold underline")
        show_pieces(console, side.llm.stream(first, **side.options))
    console.print()


def run_evaluation(
    llm: LLM,
    questions: list[Question],
    labels: dict[str, str],
    batch: int,
    options: Options,
    samples: Path | None = None,
) -> EvaluationReport:
    from outpace.lab.run import evaluate

    with ProgressBars() as shown:
        bar = shown.add_task(labels["task"], total=len(questions))

        def update_bar(report: EvaluationReport) -> None:
            text = f"{report.tokens_per_forward:.2f} tokens per forward"
            shown.update(bar, completed=len(report.outputs), description=text)

        return evaluate(
            llm, questions, batch=batch, samples=samples, progress=update_bar, **labels, **options
        )


HARNESS_FLAGS = HarnessFlags()


def evaluate_command(
    model: ModelArgument,
    method: MethodFlag = None,
    task_flags: TaskFlags = TASK_FLAGS,
    limit: LimitFlag = 100,
    batch: BatchFlag = 1,
    sampling: SamplingFlags = SAMPLING_FLAGS,
    stops: StopFlags = STOP_FLAGS,
    load_flags: LoadFlags = LOAD_FLAGS,
    harness: HarnessFlags = HARNESS_FLAGS,
    no_prefix_cache: NoPrefixCacheFlag = False,
    samples: Annotated[
        Path | None,
        Option(help="Append each answer to this file, from which a killed run resumes."),
    ] = None,
    json_path: JsonFlag = None,
) -> None:
    """Measure accuracy, tokens per forward and tokens per second of one method, all in one run.

    A protocol sets shots, template, lengths, sampling and method as in a paper; flags override it.
    With --json, all answers are written to a JSON-lines file next to the figures.
    """
    from outpace.lab.entry import format_entry
    from outpace.lab.run import judgment_records, resolve_options

    check_at_least_one(limit=limit)
    request = sampling.options() | stops.options()
    check_options(request)
    if harness.tasks is not None:
        if replace(task_flags, num_shots=None, system=None, template=None) != TASK_FLAGS:
            raise ValueError("--tasks cannot be combined with --task, --data and related flags")
        with replace_file(json_path) as file:
            llm = load_flags.open_model(model, method, prefix_cache=not no_prefix_cache)
            results, report = harness.run_harness(
                llm,
                options=request,
                batch=batch,
                task_flags=task_flags,
                limit=limit,
                samples=samples,
            )
            show_harness_results(results)
            show_truncated([report.to_record()])
            write_report(file, [report], harness=results)
        return
    if harness != HARNESS_FLAGS:
        raise ValueError("--include, --chat and --draws need --tasks")
    setting, questions = task_flags.load_setting(), task_flags.load_questions(limit)
    options = setting.request_options(request | Options(method=method))
    beside = json_path and json_path.with_name(f"{json_path.stem}.answers.jsonl")
    with replace_file(json_path) as file, replace_file(beside) as answers:
        llm = load_flags.open_model(model, options["method"], prefix_cache=not no_prefix_cache)
        request |= Options(method=llm.method)
        options = resolve_options(llm, setting, questions, request)
        labels = {"task": setting.task, "protocol": task_flags.protocol}
        report = run_evaluation(llm, questions, labels, batch, options, samples)
        console.print(format_entry(llm.name, llm.method), soft_wrap=True)
        console.print(comparison_table([report.to_record()]))
        show_truncated([report.to_record()])
        write_report(file, [report])
        if answers is not None:
            lines = (json.dumps(line, default=str) for line in judgment_records(questions, report))
            answers.write_text("".join(f"{line}\n" for line in lines))


def write_report(path: Path | None, reports: list[EvaluationReport], **more: Any) -> None:
    if path is not None:
        results = [report.to_record() for report in reports]
        text = json.dumps({"provenance": provenance_record(), "results": results, **more}, indent=2)
        path.write_text(text + "\n")
