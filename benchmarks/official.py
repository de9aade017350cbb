"""What comparisons with the authors' code share: options, decodes of both sides, their costs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import Bar, Row, Timing, alternate, arguments, costs, finish, prepare, show
from outpace import LLM, Output
from outpace.api.options import Options
from outpace.methods import Method

Decode = Callable[[list[int]], tuple[list[int], int]]
"""New tokens of a prompt, and the passes that they took."""

Result = tuple[list[list[int]], int]
"""New tokens of each prompt, and the passes that all took."""

Measured = tuple[dict[str, list[Row]], list[Bar]]
"""Tables by name, and bars."""


def parser_for(
    doc: str | None, repository: str, *, rounds: int, problems: bool = False, required: bool = True
) -> argparse.ArgumentParser:
    """The options of a comparison with a clone of a repository, stories included on request."""
    parser = arguments(doc, rounds=rounds)
    parser.add_argument("--official", type=Path, required=required, help=f"clone of {repository}")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens (128)")
    if problems:
        parser.add_argument("--problems", type=int, default=8, help="story problems (8)")
    return parser


def run_comparison(
    parser: argparse.ArgumentParser,
    load_clone: Callable[[Path], Any],
    measure: Callable[[argparse.Namespace, Any, Path], Measured],
    titles: Mapping[str, str],
) -> None:
    """Measure with the authors' module, None without a clone; show the tables and write them.

    `measure` receives the options, the module and an empty folder.
    """
    options = parser.parse_args()
    prepare(options)
    module = None if options.official is None else load_clone(options.official)
    with tempfile.TemporaryDirectory() as folder:
        tables, bars = measure(options, module, Path(folder))
    for name, rows in tables.items():
        show(titles[name], rows)
    finish(options, tables, bars)


def allow_loading(folder: Path) -> Path:
    """Add the file of generation options that authors' loading code asks for."""
    (folder / "generation_config.json").write_text("{}")
    return folder


def ours(
    llm: LLM,
    method: Method,
    tokens: int,
    passes: Callable[[Output], int] = lambda output: output.forwards,
    options: Options | None = None,
) -> Decode:
    """A decode here, with options of `generate`; `passes` counts those that are compared."""
    given: Options = {**(options or {}), "method": method, "max_tokens": tokens}

    def decode(ids: list[int]) -> tuple[list[int], int]:
        (output,) = llm.generate([ids], **given)
        return output.ids, passes(output)

    return decode


def run_over(decode: Decode, prompts: Sequence[list[int]]) -> Result:
    """Decode all prompts, one after another."""
    found = [decode(ids) for ids in prompts]
    return [ids for ids, _ in found], sum(count for _, count in found)


def compare(
    where: Row,
    decodes: Mapping[str, Decode],
    prompts: Sequence[list[int]],
    rounds: int,
    unit: str,
    *,
    same: Sequence[str] = (),
    shared: Callable[[Result], object] = lambda result: result,
    columns: Callable[[Result, Sequence[Timing]], Row] = lambda result, timings: {},
) -> list[Row]:
    """What a pass, called `unit`, costs each side and over the first one: a row for each side.

    What is `shared` of the results must be equal on the first side and those named in `same`.
    `columns` are added to a row, of the result of its side and the times that it took.
    """
    sides = {side: partial(run_over, decode, prompts) for side, decode in decodes.items()}
    results = {side: run() for side, run in sides.items()}
    first = next(iter(results.values()))
    for side in same:
        assert shared(results[side]) == shared(first), f"{where}: the outputs of {side} differ"
    passes = {side: count for side, (_, count) in results.items()}
    timings = alternate(sides, rounds)
    return [
        {**where, "side": side, **columns(results[side], timings[side]), **row}
        for side, row in costs(timings, passes, unit).items()
    ]
