"""Terminal output: text with a colour per forward pass, traces, tables and files of results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from outpace.cli.terminal import console as console

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.api.output import Output
    from outpace.api.parts import AnswerFormat
    from outpace.constraint.cloze import InfillParts


@contextmanager
def replace_file(path: Path | None) -> Iterator[Path | None]:
    """Yield a temporary file, which replaces `path` unless an exception is raised.

    Yields None if `path` is None.

    Raises:
        ValueError: Before the work, if the file cannot be written.
    """
    if path is None:
        yield None
        return
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file; give another output file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{path} is not writable; give another output file")
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    new_folders = [folder for folder in path.parents if not folder.exists()]
    try:
        check_writable(draft, path)
        try:
            yield draft
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    finally:
        for folder in new_folders:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def check_writable(draft: Path, path: Path) -> None:
    """Create the folder, and raise `ValueError` if nothing can be written there."""
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()  # no file remains if a second Ctrl-C interrupts the clean-up
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; give another output file"
        ) from error


STEP_COLOURS = ("color(31)", "color(166)", "color(133)", "color(64)", "color(99)")
"""Colours of successive forwards, with a contrast of about 4 on both white and black."""

BASIC_COLOURS = ("bright_blue", "bright_red", "magenta")
"""Colours for 16-colour terminals, with a contrast of at least 2.4 under common palettes."""

CONTROL_PICTURES = {n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"}
"""Replacements of control characters."""
CONTROL_PICTURES |= dict.fromkeys(range(127, 160), "\ufffd")
"""What is shown for control characters."""

STATE_CELLS = (" ", "░", "█", "▒", "·")
"""Cell of each slot state."""


def step_colour(step: int) -> str:
    colours = BASIC_COLOURS if console.color_system in ("standard", "windows") else STEP_COLOURS
    return colours[step % len(colours)]


def cell_style(state: int) -> str:
    return ("", "dim", f"bold {step_colour(1)}", step_colour(0), "dim")[state]


class AnswerPainter:
    """Colours a growing answer: thoughts are dim, and text has the colour of its forward."""

    def __init__(self, form: AnswerFormat) -> None:
        from outpace.api.parts import AnswerParser

        self.parser = AnswerParser(form)
        self.step = 0

    def paint(self, piece: str, *, final: bool = False) -> Text:
        """Return the next piece in colour; a blank line separates thoughts and text."""
        begins_text = not self.parser.text
        self.parser.feed(piece, final=final)
        parts = self.parser.take()
        text = Text(replace_control(parts.reasoning), style="dim")
        gap = "\n\n" if parts.text and begins_text and self.parser.reasoning else ""
        text.append(gap + replace_control(parts.text), style=f"not dim {step_colour(self.step)}")
        self.step += 1
        return text


def replace_control(text: str) -> str:
    """Replace control characters in model output, which could control the terminal."""
    return text.translate(CONTROL_PICTURES)


def print_piece(console: Console, piece: str, style: str = "") -> None:
    """Print a piece of an answer: coloured at a terminal, otherwise byte for byte.

    Rich expands tabs, and a program may read the answer.
    """
    shown = (
        Text(replace_control(piece), style) if console.is_terminal else Segments([Segment(piece)])
    )
    console.print(shown, end="", soft_wrap=True)


def show_pieces(console: Console, pieces: Iterable[str]) -> None:
    for step, piece in enumerate(pieces):
        print_piece(console, piece, step_colour(step))
    console.print()


def answer_figures(output: Output) -> str:
    """Return the line of figures of an answer, with its gain where the answer measured it."""
    gain = speed_over_plain(output)
    return output.figures + ("" if gain is None else f", {gain:.2f} × over one token per forward")


MIN_PASSES, MAX_SPREAD = 8, 1.25
"""Plain and other passes of an answer from which its gain is known, and the ratio of quartiles of
plain passes above which the machine was too busy."""


def speed_over_plain(output: Output) -> float | None:
    """Return the speed of an answer relative to one token per forward, after the prompt's.

    The time of a plain pass is the mean of those in the same answer. None where too few passes or
    a busy machine measured it, and with a second model, whose passes slow the plain ones.
    """
    import numpy as np

    if not output.has_prefill or output.draft_forwards:
        return None
    steps = output.steps[1:]
    plain = [step.seconds for step in steps if step.rows == 1]
    if min(len(plain), len(steps) - len(plain)) < MIN_PASSES:
        return None
    low, high = np.quantile(plain, (0.25, 0.75))
    if not high < MAX_SPREAD * low:
        return None
    mean = sum(plain) / len(plain)
    return output.tokens_after_prefill * mean / sum(step.seconds for step in steps)


def show_infilled(console: Console, cloze: InfillParts, output: Output) -> None:
    holes = enumerate(output.holes or ())
    for part in cloze:
        if isinstance(part, str):
            print_piece(console, part)
        else:
            number, text = next(holes)
            print_piece(console, text, step_colour(number))
    console.print()


def show_trace(console: Console, llm: LLM, output: Output, *, width: int) -> None:
    """Print each forward: model, rows, number of accepted tokens, and the canvas with holes.

    If slots were filled out of order, the canvas has one cell per slot, and the text follows below.
    """
    from outpace.api.output import is_scattered

    scattered = is_scattered(output)
    lines = canvas_cells(output, width) if scattered else canvas_lines(llm, output, width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("step", "right"), ("model", "left"), ("rows", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("slots", no_wrap=True)
    table.add_column("accepted", justify="right", no_wrap=True)
    table.add_column("canvas", no_wrap=True, overflow="crop")
    for index, (step, line) in enumerate(zip(output.steps, lines, strict=True)):
        line.truncate(width, overflow="ellipsis")
        slots = f"{step.start}–{step.start + step.rows - 1}"
        accepted = str(step.committed) if step.committed else ""
        table.add_row(str(index + 1), step.model, str(step.rows), slots, accepted, line)
    console.print(table)
    if scattered:
        console.print(cell_legend())
        console.print(replace_control(output.text) or output.ids)


def canvas_cells(output: Output, width: int) -> Iterator[Text]:
    """Yield the slots of the answer after each step of the target; empty for other models."""
    lines = slot_lines(output, width)
    for step in output.steps:
        yield next(lines) if step.model == "target" else Text()


def slot_lines(output: Output, width: int) -> Iterator[Text]:
    """Yield a line per forward of the target, with a cell per slot and the edges of blocks.

    A line that is too long omits its oldest slots.
    """
    from outpace.api.output import block_edges, slot_states

    states = slot_states(output)
    edges = [0, *block_edges(output), states.shape[1]]
    for row in states:
        line = Text()
        for begin, end in pairwise(edges):
            for state in row[begin:end]:
                line.append(STATE_CELLS[state], style=cell_style(state))
            if row[begin:end].any() and end < len(row):
                line.append("│", style="dim")
        line.rstrip()
        yield line if len(line) <= width else Text("…", style="dim") + line[1 - width :]


def cell_legend() -> Text:
    from outpace.api.output import STATE_CACHED, STATE_FILLED, STATE_FULL, STATE_HOLE, STATE_NAMES

    line = Text(style="dim")
    for state in (STATE_HOLE, STATE_FILLED, STATE_FULL, STATE_CACHED):
        line.append(f"{STATE_CELLS[state]} ", style=cell_style(state)).append(
            f"{STATE_NAMES[state]}   "
        )
    return line


def canvas_lines(llm: LLM, output: Output, width: int) -> Iterator[Text]:
    """Yield the output after each step: earlier text, new text, and the holes in view.

    Earlier text is shortened from the left so that all new text fits, if possible.
    """
    from outpace.api.output import STATE_HOLE

    done = 0
    for index, step in enumerate(output.steps):
        before = single_line_text(llm, output.ids[:done])
        after = single_line_text(llm, output.ids[: done + step.committed])
        done += step.committed
        new = after[len(before) :]
        room = min(max(width - len(new) - 1, 0), 40)
        line = Text(before[max(len(before) - room, 0) :], style="dim")
        line.append(new, style=f"bold {step_colour(index)}")
        holes = step.start + step.rows - output.prompt_tokens - done
        yield line.append(STATE_CELLS[STATE_HOLE] * max(holes, 0), style="dim")


def single_line_text(llm: LLM, ids: list[int]) -> str:
    """Decode tokens to one line; returns their ids if the model has no tokenizer."""
    if llm.text.tokenizer is None:
        return " ".join(map(str, ids))
    return replace_control(llm.text.decode(ids).replace("\n", "⏎"))
