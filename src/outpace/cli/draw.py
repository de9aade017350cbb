"""What the command line shows: text coloured by forward pass, traces, tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outpace.api.llm import LLM
from outpace.api.output import Output
from outpace.api.trace import (
    FILLED,
    FULL,
    HOLE,
    KEPT,
    STATES,
    block_edges,
    is_scattered,
    slot_states,
)
from outpace.cli.terminal import bars as bars
from outpace.cli.terminal import console as console
from outpace.constraint.cloze import Parts
from outpace.evaluation.report import Report

COLOURS = ("color(31)", "color(166)", "color(133)", "color(64)", "color(99)")
"""Of forwards, in turn: each has a contrast of about 4 on white and on black alike."""

FEW = ("bright_blue", "bright_red", "magenta")
"""The same of the 16 that every terminal mixes for itself: where none of them falls below 2.4."""

PICTURES = {n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"}
PICTURES |= dict.fromkeys(range(127, 160), "\ufffd")
"""What is shown for control characters."""

CELLS = (" ", "░", "█", "▒", "·")


def colour(step: int) -> str:
    """Colour of what a forward committed; neighbours differ."""
    colours = FEW if console.color_system in ("standard", "windows") else COLOURS
    return colours[step % len(colours)]


def style(state: int) -> str:
    """How the cell of a slot looks."""
    return ("", "dim", f"bold {colour(1)}", colour(0), "dim")[state]


def coloured(pieces: Iterable[str]) -> Iterator[Text]:
    """Pieces, a colour each."""
    return (Text(visible(piece), style=colour(step)) for step, piece in enumerate(pieces))


def visible(text: str) -> str:
    """A text of a model, in which nothing commands the terminal."""
    return text.translate(PICTURES)


def show_pieces(console: Console, pieces: Iterable[str]) -> None:
    """Print pieces as they come, a colour each."""
    for piece in coloured(pieces):
        console.print(piece, end="", soft_wrap=True)
    console.print()


def show_filled(console: Console, cloze: Parts, output: Output) -> None:
    """Print a text whose holes were filled, a colour each."""
    line, holes = Text(), enumerate(output.holes or ())
    for part in cloze:
        if isinstance(part, str):
            line.append(part)
        else:
            number, text = next(holes)
            line.append(visible(text), style=colour(number))
    console.print(line, soft_wrap=True)


def statistics(output: Output) -> str:
    """One line about how an answer was decoded."""
    return output.figures


def show_trace(console: Console, llm: LLM, output: Output, *, width: int) -> None:
    """Print each forward: the model that ran, its rows, what was kept, the canvas with holes.

    Where slots were filled out of order, the canvas is one cell per slot, the text stands below.
    """
    scattered = is_scattered(output)
    lines = cells(output, width) if scattered else canvases(llm, output, width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("step", "right"), ("model", "left"), ("rows", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("slots", no_wrap=True)
    table.add_column("kept", justify="right", no_wrap=True)
    table.add_column("canvas", no_wrap=True, overflow="crop")
    for index, (step, line) in enumerate(zip(output.steps, lines, strict=True)):
        line.truncate(width, overflow="ellipsis")
        slots = f"{step.start}–{step.start + step.rows - 1}"
        kept = str(step.kept) if step.kept else ""
        table.add_row(str(index + 1), step.model, str(step.rows), slots, kept, line)
    console.print(table)
    if scattered:
        console.print(legend())
        console.print(visible(output.text) or output.ids)


def cells(output: Output, width: int) -> Iterator[Text]:
    """The slots of the answer after each step of the target; nothing for another model's."""
    lines = slot_lines(output, width)
    for step in output.steps:
        yield next(lines) if step.model == "target" else Text()


def slot_lines(output: Output, width: int) -> Iterator[Text]:
    """A line for each forward of the target, a cell for each slot, with edges of blocks.

    A line that is too long loses its oldest slots.
    """
    states = slot_states(output)
    edges = [0, *block_edges(output), states.shape[1]]
    for row in states:
        line = Text()
        for begin, end in pairwise(edges):
            for state in row[begin:end]:
                line.append(CELLS[state], style=style(state))
            if row[begin:end].any() and end < len(row):
                line.append("│", style="dim")
        line.rstrip()
        yield line if len(line) <= width else Text("…", style="dim") + line[1 - width :]


def legend() -> Text:
    """What the cells mean."""
    line = Text(style="dim")
    for state in (HOLE, FILLED, FULL, KEPT):
        line.append(f"{CELLS[state]} ", style=style(state)).append(f"{STATES[state]}   ")
    return line


def canvases(llm: LLM, output: Output, width: int) -> Iterator[Text]:
    """The output after each step: what stood there, what is new, and the holes in view.

    Of what stood there so much is left out that all of what is new has room, if anyhow it fits.
    """
    done = 0
    for index, step in enumerate(output.steps):
        before = text_of(llm, output.ids[:done])
        after = text_of(llm, output.ids[: done + step.kept])
        done += step.kept
        new = after[len(before) :]
        room = min(max(width - len(new) - 1, 0), 40)
        line = Text(before[max(len(before) - room, 0) :], style="dim")
        line.append(new, style=f"bold {colour(index)}")
        holes = step.start + step.rows - output.prompt_tokens - done
        yield line.append(CELLS[HOLE] * max(holes, 0), style="dim")


def text_of(llm: LLM, ids: list[int]) -> str:
    """Text of tokens on one line; their ids where the model has no tokenizer."""
    if llm.text.tokenizer is None:
        return " ".join(map(str, ids))
    return visible(llm.text.decode(ids).replace("\n", "⏎"))


def report_table(reports: Iterable[tuple[str, Report]], *, scored: bool) -> Table:
    """Headline metrics side by side, from one run."""
    table = Table(header_style="bold")
    table.add_column("model and method", overflow="fold", min_width=24)
    if scored:
        table.add_column("accuracy\n95 %", justify="right", no_wrap=True)
    for name in ("tokens\nper forward", "tokens\nper second", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, report in reports:
        low, high = report.interval
        accuracy = f"{report.accuracy:.1%}\n{low:.1%}–{high:.1%}" if report.judged else "—"
        table.add_row(
            name,
            *([accuracy] if scored else []),
            f"{report.tokens_per_forward:.2f}",
            f"{report.tokens_per_second:.0f}",
            str(report.tokens),
        )
    return table


def show_cut(results: Sequence[Mapping[str, Any]]) -> None:
    """Print which results, as they are written to JSON, have answers that `max_tokens` has cut."""
    for number, result in enumerate(results, 1):
        if count := result.get("unfinished"):
            run = f"run {number}: " if len(results) > 1 else ""
            at = result.get("cut_at")
            length = "" if at is None else f" at {at} tokens"
            text = f"{run}{count} of {result['problems']} answers were cut{length}"
            effect = "" if result["accuracy"] is None else ", and judged as they are"
            console.print(f"{text}{effect}: raise --max-tokens", style="bold", soft_wrap=True)
