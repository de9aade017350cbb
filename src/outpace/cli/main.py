"""The command line: one function a command."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import safe_open

from outpace.answers import answer_file
from outpace.cli.draw import report_table, show_pieces, show_trace, statistics
from outpace.cli.options import flag, named, parse_method, with_method
from outpace.evaluation.run import Report, evaluate, questions_of
from outpace.evaluation.tasks import TASKS
from outpace.llm import LLM, Options
from outpace.methods import METHODS, Method
from outpace.models.families import FAMILIES
from outpace.models.load import ZOO, load_config, zoo_names
from outpace.provenance import provenance

console = Console(highlight=False)

RACE = (
    "tiny-ar autoregressive",
    "tiny-ar dflash draft=tiny-dflash",
    "tiny-wedlm wedlm verify=true",
    "tiny-dream left_to_right tokens=1 window=16 lookahead=16",
    "tiny-dream left_to_right tokens=4 window=16 lookahead=16",
    "tiny-dream apd verifier=tiny-aux ratio=0.5 window=16 lookahead=16",
    "tiny-d2f d2f add=0.5 confidence=0.98",
)

ModelName = Annotated[str, typer.Argument(help="Folder, hub name, or model of the zoo.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer; 256 unless given.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; the family's by default.")]
TopP = Annotated[float | None, typer.Option(help="Mass of the nucleus; the family's by default.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most probable tokens.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text, without chat template.")]
PrefixCache = Annotated[bool, typer.Option(help="Keep what prompts that begin alike share.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")]
AdapterName = Annotated[str | None, typer.Option(help="Folder or hub name of a LoRA to merge.")]
Limit = Annotated[int, typer.Option(help="Number of problems.")]
Batch = Annotated[int, typer.Option(help="Requests that run at a time.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]


SMALL = 20_000_000


def open_llm(
    model: str,
    method: Method | None,
    dtype: str | None,
    device: str | None,
    adapter: str | None = None,
    prefix_cache: bool = True,
) -> LLM:
    """A model ready to decode; a small one with one thread, since more only wait for each other."""
    llm = LLM(model, method, adapter=adapter, dtype=dtype, device=device, prefix_cache=prefix_cache)
    if llm.device.type == "cpu" and llm.target.parameters < SMALL:
        torch.set_num_threads(1)
    return llm


def generate(
    model: ModelName,
    prompt: Annotated[str | None, typer.Argument(help="What to answer.")] = None,
    method: Method | None = None,
    input: Annotated[Path | None, typer.Option(help="JSON lines to answer instead.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where their answers go.")] = None,
    batch: Batch = 64,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    raw: Raw = False,
    adapter: AdapterName = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer a prompt, streamed and coloured by forward pass; or a file of prompts.

    Lines of the file are JSON with prompt or messages. Their answers are appended to the output as
    training data; given again, the same command goes on where it was stopped.
    """
    if (prompt is None) == (input is None) or (input is None) != (output is None):
        raise ValueError("give a prompt, or --input and --output")
    llm = open_llm(model, method, dtype, device, adapter)
    options = choice(max_tokens, temperature, top_p, top_k, seed)
    options |= {"stop": stop or (), "raw": raw}
    if input is not None and output is not None:
        with bars() as shown:
            bar = shown.add_task("answers")
            answer_file(
                llm,
                input,
                output,
                batch=batch,
                progress=lambda done, total: shown.update(bar, completed=done, total=total),
                **options,
            )
        return
    assert prompt is not None
    stream = llm.stream(prompt, **options)
    show_pieces(console, stream)
    assert stream.output is not None
    console.print(statistics(stream.output), style="dim")


def choice(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int,
) -> Options:
    """The flags that every command has which samples."""
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }


def bars() -> Progress:
    """Progress bars, gone once they are full."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def trace(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    method: Method | None = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    raw: Raw = False,
    adapter: AdapterName = None,
    dtype: Dtype = None,
    device: Device = None,
    png: Annotated[Path | None, typer.Option(help="Draw slots by forwards to this file.")] = None,
) -> None:
    """Answer a prompt and print every forward: model, rows, kept tokens, canvas with holes."""
    if png is not None:
        from outpace.cli.picture import draw_slots
    llm = open_llm(model, method, dtype, device, adapter)
    options = choice(max_tokens, temperature, top_p, top_k, seed)
    options["raw"] = raw
    (output,) = llm.generate(prompt, **options)
    show_trace(console, llm, output, width=max(console.width - 44, 20))
    console.print(statistics(output), style="dim")
    if png is not None:
        counted = f"{len(output.ids)} tokens in {output.forwards} forwards of {llm.name}"
        draw_slots(output, f"{counted}\n{llm.method}", png)


def race(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; story problems where none is given.")
    ] = None,
    entry: Annotated[
        list[str] | None, typer.Option(help="'MODEL METHOD option=value …', once for each racer.")
    ] = None,
    limit: Limit = 25,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    json_path: JsonPath = None,
) -> None:
    """Several methods on the same prompts: answers coloured by forward, then one table.

    Without a prompt they solve held-out story problems, so that the table has an accuracy.
    """
    racers = line_up(entry or RACE, dtype, device)
    questions = questions_of("story", limit)
    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    first = questions[0].prompt if prompt is None else prompt
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
            reports.append((title, run(llm, "story", limit, None, 1, options)))
        else:
            assert stream.output is not None
            seconds = stream.output.seconds
            report = Report(task="", model=llm.name, method=repr(method), batch=1, seconds=seconds)
            report.add(stream.output, False)
            reports.append((title, report))
    console.print()
    console.print(report_table(reports, scored=prompt is None))
    if prompt is None:
        console.print(f"{limit} held-out story problems (not GSM8K), one at a time", style="dim")
    write_json(json_path, [report for _, report in reports])


def line_up(
    entries: Sequence[str], dtype: str | None, device: str | None
) -> dict[str, tuple[LLM, Method]]:
    """Model and method of each racer; `ValueError` for a bad one before any of them runs."""
    parsed = {text: parse_entry(text) for text in entries}
    llms: dict[str, LLM] = {}
    for model, method in parsed.values():
        if model not in llms:
            # What one racer has computed for a prompt must not help the next.
            llms[model] = open_llm(model, method, dtype, device, prefix_cache=False)
        llms[model].bind(method)
    return {text: (llms[model], method) for text, (model, method) in parsed.items()}


def parse_entry(text: str) -> tuple[str, Method]:
    """Model and method of a racer."""
    model, *rest = text.split()
    if not rest or not all("=" in option for option in rest[1:]):
        raise ValueError(f"{text!r} is no entry: write 'MODEL METHOD option=value …'")
    return model, parse_method(rest[0], dict(option.split("=", 1) for option in rest[1:]))


def run(llm: LLM, task: str, limit: int, data: str | None, batch: int, options: Options) -> Report:
    """Evaluate with a progress bar."""
    questions = questions_of(task, limit, data)
    with bars() as shown:
        bar = shown.add_task(task, total=len(questions))

        def progress(report: Report) -> None:
            text = f"{report.accuracy:.1%} right, {report.tokens_per_forward:.2f} TPF"
            shown.update(bar, advance=1, description=text)

        return evaluate(llm, questions, task=task, batch=batch, progress=progress, **options)


def evaluate_command(
    model: ModelName,
    method: Method | None = None,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "story",
    data: Annotated[str | None, typer.Option(help="File of the task, where it needs one.")] = None,
    limit: Limit = 100,
    batch: Batch = 1,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    adapter: AdapterName = None,
    prefix_cache: PrefixCache = True,
    dtype: Dtype = None,
    device: Device = None,
    json_path: JsonPath = None,
) -> None:
    """Accuracy, tokens per forward and tokens per second of one method, from the same run."""
    questions_of(task, limit, data)
    llm = open_llm(model, method, dtype, device, adapter, prefix_cache)
    options = choice(max_tokens, temperature, top_p, top_k, seed)
    report = run(llm, task, limit, data, batch, options)
    console.print(report_table([(f"{llm.name} {report.method}", report)], scored=True))
    write_json(json_path, [report])


def write_json(path: Path | None, reports: list[Report]) -> None:
    """Write figures with their provenance."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results = [report.summary() for report in reports]
        text = json.dumps({"provenance": provenance(), "results": results}, indent=2)
        path.write_text(text + "\n")


def train_command(
    recipe: Annotated[Path, typer.Argument(help="TOML file of a training.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that share each step.")] = 1,
) -> None:
    """Train what a recipe says; a run that was stopped goes on from its last checkpoint."""
    try:
        from outpace.training.recipe import train
    except ImportError as error:
        raise ValueError(f"{error}; training needs: pip install 'outpace[train]'") from error
    train(recipe, overrides or [], processes)


def models() -> None:
    """The models that ship inside the package, and the formats that load."""
    table = Table(header_style="bold")
    for column in ("model of the zoo", "family", "parameters", "megabytes"):
        table.add_column(column)
    for name in zoo_names():
        table.add_row(name, *described(name))
    console.print(table)
    table = Table(header_style="bold")
    for column in ("family", "architectures", "about"):
        table.add_column(column)
    for family in FAMILIES.values():
        table.add_row(family.name, ", ".join(family.architectures), family.about)
    console.print(table)


def described(name: str) -> tuple[str, str, str]:
    """Family, parameters and size of a zoo model."""
    path = ZOO / name / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        parameters = sum(prod(file.get_slice(tensor).get_shape()) for tensor in file.keys())  # noqa: SIM118
    size = path.stat().st_size
    return load_config(name).family, f"{parameters / 1e6:.2f}M", f"{size / 2**20:.1f}"


def methods() -> None:
    """The decoding methods and their options."""
    table = Table(header_style="bold")
    for column in ("method", "decodes", "options", "about"):
        table.add_column(column)
    for name, kind in METHODS.items():
        options = ", ".join(f"--{flag(option.name)}" for option in fields(kind))
        about = (kind.__doc__ or "").splitlines()[0]
        kinds = "diffusion models" if kind.bidirectional else "causal models"
        table.add_row(name, kinds, options or "—", about)
    console.print(table)


COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "race": race,
    "trace": trace,
    "evaluate": evaluate_command,
    "train": train_command,
    "models": models,
    "methods": methods,
}


def build(method: str | None = None) -> typer.Typer:
    """The application, where commands that decode take the flags of `method`."""
    app = typer.Typer(
        help="Parallel decoding of language models: several tokens per forward pass.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    for name, function in COMMANDS.items():
        decodes = "method" in inspect.signature(function).parameters
        app.command(name)(with_method(function, method) if decodes else function)
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line on standard error and exit status 2."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        build(named(words))(words)
    except ValueError as error:
        print(f"outpace: {error}", file=sys.stderr)
        sys.exit(2)
