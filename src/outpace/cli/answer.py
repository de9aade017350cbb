"""Commands that decode: `generate` and `trace`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Option

from outpace.api.options import Options, check_options
from outpace.cli.draw import (
    answer_figures,
    console,
    print_piece,
    replace_file,
    show_infilled,
    show_pieces,
    show_trace,
)
from outpace.cli.flags import (
    CONSTRAINT_FLAGS,
    LOAD_FLAGS,
    PROMPT_FLAGS,
    SAMPLING_FLAGS,
    STOP_FLAGS,
    BatchFlag,
    ConstraintFlags,
    FillFlag,
    LoadFlags,
    LogprobsFlag,
    ModelArgument,
    PromptFlags,
    RawFlag,
    SamplingFlags,
    StopFlags,
    read_prompt,
)
from outpace.cli.options import MethodFlag
from outpace.cli.terminal import (
    CONSOLE_OPTIONS,
    ProgressBars,
    error_console,
    show_reading,
    show_spinner,
)
from outpace.errors import OptionError

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.api.output import Output
    from outpace.api.text import Prompt


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, Argument(help="The prompt; - reads standard input.")] = None,
    fill: FillFlag = None,
    method: MethodFlag = None,
    input: Annotated[Path | None, Option(help="File of prompts, as JSON lines.")] = None,
    output: Annotated[Path | None, Option(help="File to append the answers to.")] = None,
    batch: BatchFlag = 64,
    n: Annotated[int, Option("--n", help="Number of answers, with consecutive seeds.")] = 1,
    logprobs: LogprobsFlag = False,
    quiet: Annotated[bool, Option("--quiet", help="Print the answer without figures.")] = False,
    sampling: SamplingFlags = SAMPLING_FLAGS,
    stops: StopFlags = STOP_FLAGS,
    prompt_flags: PromptFlags = PROMPT_FLAGS,
    raw: RawFlag = False,
    constraint: ConstraintFlags = CONSTRAINT_FLAGS,
    load_flags: LoadFlags = LOAD_FLAGS,
) -> None:
    """Answer a prompt, streamed and coloured by forward pass, or a file of prompts.

    Each line of --input is a JSON object with prompt or messages. The answers are appended to
    --output as training data. An interrupted run continues when the same command is repeated.

    With --fill, holes in a text are filled: {{8}} is a hole of 8 tokens, {{..8}} of at most 8, and
    {{8:[0-9]+}} must match a regular expression. If a prompt is also given, the text is
    treated as the answer to it.

    Answers are on standard output, and figures on standard error.
    """
    from outpace.api.infill import parse_template

    notes = Console(quiet=True) if quiet else error_console
    if fill is not None and (input is not None or output is not None or n != 1):
        raise OptionError("fill", fill, "cannot be combined with --input, --output or --n")
    has_prompt = prompt is not None or fill is not None
    if has_prompt == (input is not None) or (input is None) != (output is None):
        raise ValueError("give either a prompt, or both --input and --output")
    if input is not None and (n != 1 or logprobs or prompt_flags.system is not None):
        raise ValueError("--n, --logprobs and --system cannot be combined with --input")
    if n < 1:
        raise OptionError("n", n, "must be at least 1")
    if prompt is None and prompt_flags.system is not None:
        raise OptionError("system", prompt_flags.system, "needs a prompt")
    text = None if prompt is None else read_prompt(prompt)
    cloze = None if fill is None else parse_template(fill)
    options = sampling.options() | stops.options() | prompt_flags.options() | constraint.options()
    options |= Options(raw=raw, logprobs=logprobs)
    check_options(options)
    if input is not None and output is not None:
        llm = load_flags.open_model(model, method, notes=notes)
        return answer_prompt_file(llm, input, output, batch, options, notes)
    llm = load_flags.open_model(model, method, notes=notes, max_sequences=min(n, 256))
    question = None if text is None else prompt_flags.build_prompt(llm, text, raw=raw)
    if cloze is not None:
        answer = llm.fill(cloze, prompt=question, **options)
        show_infilled(console, cloze, answer)
        show_logprobs(llm, answer)
        print_figures(notes, answer.figures)
    elif question is not None:
        show_answers(llm, question, n, options, notes)


def show_answers(llm: LLM, prompt: Prompt, n: int, options: Options, notes: Console) -> None:
    """Stream one answer, or print several when all are complete; their figures are notes."""
    if n == 1:
        stream = llm.stream(prompt, **options)
        if not notes.quiet:
            show_reading(stream)
        show_pieces(console, stream)
        assert stream.output is not None
        show_logprobs(llm, stream.output)
        print_figures(notes, answer_figures(stream.output))
        return
    with show_spinner(f"{n} answers"):
        (outputs,) = llm.generate(prompt, n=n, **options)
    for seed, output in enumerate(outputs, options.get("seed", 0)):
        notes.print(f"seed {seed}", style="bold underline")
        print_piece(console, f"{output.text}\n")
        show_logprobs(llm, output)
        print_figures(notes, output.figures)


def print_figures(notes: Console, line: str) -> None:
    notes.print(line, style="dim", soft_wrap=True)


def show_logprobs(llm: LLM, output: Output) -> None:
    for token, logprob in zip(output.ids, output.logprobs or (), strict=False):
        console.print(f"{logprob:9.4f}  {token:6}  {llm.text.decode([token])!r}", soft_wrap=True)
    for text, logprob in (output.choice_logprobs or {}).items():
        console.print(f"{logprob:9.4f}  {text!r}", soft_wrap=True)


def answer_prompt_file(
    llm: LLM, source: Path, target: Path, batch: int, options: Options, notes: Console
) -> None:
    from outpace.data.answers import answer_file

    began, written = time.perf_counter(), 0
    with ProgressBars() as shown:
        bar = shown.add_task("answers")

        def update_bar(done: int, total: int, tokens: int) -> None:
            nonlocal written
            written = tokens
            shown.update(bar, completed=done, total=total)

        count = answer_file(llm, source, target, batch=batch, progress=update_bar, **options)
    seconds = time.perf_counter() - began
    speed = f"{written} tokens in {seconds:.1f} s, {written / seconds:.0f} tokens per second"
    print_figures(notes, f"{count} answers in {target}: {speed}")


def trace(
    model: ModelArgument,
    prompt: Annotated[str, Argument(help="The prompt; - reads standard input.")],
    method: MethodFlag = None,
    sampling: SamplingFlags = SAMPLING_FLAGS,
    stops: StopFlags = STOP_FLAGS,
    prompt_flags: PromptFlags = PROMPT_FLAGS,
    raw: RawFlag = False,
    load_flags: LoadFlags = LOAD_FLAGS,
    png: Annotated[
        Path | None, Option(help="Write a picture of slots by forwards to this file.")
    ] = None,
) -> None:
    """Answer a prompt and print each forward: model, rows, accepted tokens and canvas."""
    if png is not None:
        from outpace.cli.plots import draw_slots
    options = sampling.options() | stops.options() | prompt_flags.options() | Options(raw=raw)
    check_options(options)
    with replace_file(png) as picture:
        text = read_prompt(prompt)
        llm = load_flags.open_model(model, method)
        (output,) = llm.generate(prompt_flags.build_prompt(llm, text, raw=raw), **options)
        wide = console if console.is_terminal else Console(width=200, **CONSOLE_OPTIONS)
        show_trace(wide, llm, output, width=max(wide.width - 44, 20))
        console.print(output.figures, style="dim", soft_wrap=True)
        if picture is not None:
            counts = f"{len(output.ids)} tokens in {output.forwards} forwards of {llm.name}"
            draw_slots(output, f"{counts}\n{llm.method}", picture)
