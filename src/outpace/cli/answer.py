"""Commands that show answers: `generate` and `trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from outpace.answers import answer_file
from outpace.cli.draw import bars, console, show_filled, show_pieces, show_trace, statistics
from outpace.cli.flags import (
    CHOICE,
    LOADING,
    RULE,
    Batch,
    Choice,
    ClozeText,
    Loading,
    ModelName,
    Raw,
    Rule,
)
from outpace.cli.output import replaced
from outpace.layout import cloze_of
from outpace.methods import Method
from outpace.options import Options


def generate(
    model: ModelName,
    prompt: Annotated[str | None, Argument(help="What to answer.")] = None,
    fill: ClozeText = None,
    method: Method | None = None,
    input: Annotated[Path | None, Option(help="JSON lines to answer instead.")] = None,
    output: Annotated[Path | None, Option(help="Where their answers go.")] = None,
    batch: Batch = 64,
    choice: Choice = CHOICE,
    stop: Annotated[list[str] | None, Option(help="End before this text.")] = None,
    raw: Raw = False,
    rule: Rule = RULE,
    loading: Loading = LOADING,
) -> None:
    """Answer a prompt, streamed and coloured by forward pass; or a file of prompts.

    Lines of the file are JSON with prompt or messages. Their answers are appended to the output as
    training data; given again, the same command goes on where it was stopped.

    With `--fill` a text is completed: {{8}} is a hole of 8 tokens, {{..8}} of up to 8, {{8:[0-9]+}}
    one whose text is of a regular expression. The prompt, if there is one, is what it answers.
    """
    if fill is not None:
        if input is not None or output is not None:
            raise ValueError("--fill takes a text, and no --input or --output")
        cloze = cloze_of(fill)
        llm = loading.open(model, method)
        options = choice.options() | rule.options() | Options(stop=stop or (), raw=raw)
        filled = llm.fill(cloze, prompt=prompt, **options)
        show_filled(console, cloze, filled)
        console.print(statistics(filled), style="dim")
        return
    if (prompt is None) == (input is None) or (input is None) != (output is None):
        raise ValueError("give a prompt, or --input and --output")
    llm = loading.open(model, method)
    options = choice.options() | rule.options() | Options(stop=stop or (), raw=raw)
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


def trace(
    model: ModelName,
    prompt: Annotated[str, Argument(help="What to answer.")],
    method: Method | None = None,
    choice: Choice = CHOICE,
    raw: Raw = False,
    loading: Loading = LOADING,
    png: Annotated[Path | None, Option(help="Draw slots by forwards to this file.")] = None,
) -> None:
    """Answer a prompt and print every forward: model, rows, kept tokens, canvas with holes."""
    if png is not None:
        from outpace.cli.picture import draw_slots
    with replaced(png) as picture:
        llm = loading.open(model, method)
        (output,) = llm.generate(prompt, **choice.options() | Options(raw=raw))
        show_trace(console, llm, output, width=max(console.width - 44, 20))
        console.print(statistics(output), style="dim")
        if picture is not None:
            counted = f"{len(output.ids)} tokens in {output.forwards} forwards of {llm.name}"
            draw_slots(output, f"{counted}\n{llm.method}", picture)
