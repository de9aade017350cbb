"""The command line: its commands, and one line for whatever a user did wrong."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, cast, get_args

from typer import BadParameter, Typer
from typer.main import get_command

from outpace.cli.answer import generate, trace
from outpace.cli.benchmark import benchmark_serve
from outpace.cli.lists import methods, models
from outpace.cli.measure import evaluate_command, race
from outpace.cli.options import named, parse_method, requested_method, spread, with_method
from outpace.cli.report import report
from outpace.cli.reproduce import reproduce
from outpace.cli.serve import serve
from outpace.cli.sides import benchmark_methods
from outpace.cli.training import list_recipes, show_recipe, train_command
from outpace.cli.tune import tune
from outpace.methods import Method

# Typer offers the last of these by name and the whole of them to nobody.
UsageError = cast(type[BadParameter], BadParameter.__mro__[1])
INTERRUPTED = 130


COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "race": race,
    "trace": trace,
    "evaluate": evaluate_command,
    "report": report,
    "tune": tune,
    "reproduce": reproduce,
    "serve": serve,
    "train": train_command,
    "models": models,
    "methods": methods,
}
BENCHMARKS: dict[str, Callable[..., None]] = {
    "methods": benchmark_methods,
    "serve": benchmark_serve,
}
"""Commands of the group `benchmark`."""


def build(method: str | None = None) -> Typer:
    """The application, where commands that decode take the flags of `method`."""
    app = Typer(
        help="Parallel decoding of language models: several tokens per forward pass.",
        add_completion=False,
    )
    group = Typer(help="Measure for comparison.")
    app.add_typer(group, name="benchmark")
    listed = Typer(invoke_without_command=True)
    listed.callback()(list_recipes)
    listed.command("show")(show_recipe)
    app.add_typer(listed, name="recipes")
    for name, function in COMMANDS.items():
        app.command(name)(command_of(function, method))
    for name, function in BENCHMARKS.items():
        group.command(name)(command_of(function, method))
    return app


def command_of(function: Callable[..., None], method: str | None) -> Callable[..., None]:
    """A command with a flag for each field of its groups and, where it decodes, of `method`."""
    flat = spread(function)
    chosen = inspect.signature(flat, eval_str=True).parameters.get("method")
    if chosen is None:
        return flat
    whole = Method in get_args(chosen.annotation)
    return with_method(flat, method, parse_method if whole else requested_method)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line on standard error and exit status 2."""
    words = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        status = get_command(build(named(words))).main(words, standalone_mode=False)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except UsageError as error:
        fail(error.format_message())
    except (ValueError, OSError) as error:
        fail(str(error))
    if status == INTERRUPTED:
        fail("interrupted", INTERRUPTED)
    sys.exit(status)


def fail(message: str, status: int = 2) -> NoReturn:
    """End with one line on standard error."""
    print(f"outpace: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
