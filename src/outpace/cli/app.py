"""The command-line application, which imports only the command that is run."""

from __future__ import annotations

import ast
import inspect
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any, cast

from typer import BadParameter, Exit, Option, Typer
from typer.main import get_command

from outpace.cli.terminal import COMPLETION, FAILED, exit_with_error
from outpace.version import __version__

# Typer exports only the subclass `BadParameter`; its base covers all usage errors.
UsageError = cast(type[BadParameter], BadParameter.__mro__[1])

COMMANDS = {
    "generate": "outpace.cli.answer:generate",
    "chat": "outpace.cli.chat:chat",
    "race": "outpace.lab.commands.evaluate:race",
    "trace": "outpace.cli.answer:trace",
    "evaluate": "outpace.lab.commands.evaluate:evaluate_command",
    "report": "outpace.lab.commands.report:report",
    "reproduce": "outpace.lab.commands.reproduce:reproduce",
    "serve": "outpace.cli.serve:serve",
    "data": "outpace.cli.data:data",
    "train": "outpace.cli.draft:train_group",
    "quantize": "outpace.cli.quantize:quantize",
    "pull": "outpace.cli.pull:pull",
    "rm": "outpace.cli.pull:rm",
    "models": "outpace.cli.lists:models",
    "methods": "outpace.cli.lists:methods",
    "recipes": "outpace.cli.training:recipes_group",
    "benchmark methods": "outpace.lab.commands.benchmark_methods:benchmark_methods",
}
"""Module and function of each command."""

COMMAND_FACTORIES = ("recipes", "train")
"""Commands whose function returns the command itself."""


def load_command(words: Sequence[str]) -> Any:
    """Build the application, of which only the command that `words` name is imported."""
    if COMPLETION in os.environ:
        typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
        words = typed.split(" ")[1:-1]
    names = [word for word in words if not word.startswith("-")][:2]
    app = Typer(context_settings={"help_option_names": ["-h", "--help"]})
    app.callback()(outpace)
    benchmarks = Typer(help="Benchmark methods.")
    # Reading the texts of all other commands would take a third of the start.
    named = [path for path in COMMANDS if path.split() == names[: len(path.split())]]
    for path in named or COMMANDS:
        *group, name = path.split()
        command = import_command(path, words) if named else describe_command(COMMANDS[path])
        parent = benchmarks if group else app
        if isinstance(command, Typer):
            parent.add_typer(command, name=name)
        else:
            parent.command(name)(command)
    app.add_typer(benchmarks, name="benchmark")
    built = get_command(app)
    unwrap_help(built)
    return built


def unwrap_help(command: Any) -> None:
    """Join the lines of paragraphs in all help texts, which only the terminal is to wrap."""
    if command.help:
        paragraphs = command.help.split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for each in getattr(command, "commands", {}).values():
        unwrap_help(each)


def import_command(path: str, words: Sequence[str]) -> Callable[..., None] | Typer:
    """Import a command, with the flags of the method in `words`."""
    from outpace.cli.options import add_method_flags, expand_groups

    module, _, name = COMMANDS[path].partition(":")
    loaded = getattr(import_module(module), name)
    if path in COMMAND_FACTORIES:
        loaded = loaded()
    if isinstance(loaded, Typer):
        return loaded
    function = expand_groups(loaded)
    if "method" in inspect.signature(function).parameters:
        function = add_method_flags(function, flag_values(words).get("--method"))
    return function


def describe_command(place: str) -> Callable[[], None]:
    """Return an empty command with the docstring of a function that is not imported."""
    module, _, name = place.partition(":")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text("utf-8")).body
    (function,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)

    def describe() -> None: ...

    describe.__doc__ = ast.get_docstring(function)
    return describe


def flag_values(words: Sequence[str]) -> dict[str, str | None]:
    """Return the word after each flag, which is its last value unless it takes none."""
    pairs = (word.split("=", 1) if word.startswith("--") else [word] for word in words)
    parts = [*chain.from_iterable(pairs)]
    return dict(zip_longest(parts, parts[1:]))


def open_server(words: Sequence[str]) -> AbstractContextManager[Any]:
    """Start a server if the words are those of one; `OptionError` if its address is not available.

    The start is None where this process does not listen alone, and for errors that `serve` names.
    """
    values, others = flag_values(words), {"-h", "--help", "--replicas", "--tensor-parallel"}
    if words[0] != "serve" or others & {*values} or not hasattr(signal, "pthread_sigmask"):
        return nullcontext()
    if find_spec("pydantic") is None:  # `serve` names the missing extra
        return nullcontext()
    try:
        from outpace.field_types import list_options
        from outpace.server.start import Settings, read_table, start_server

        path = values.get("--config")
        table = {} if path is None else read_table(Path(path))
        if "tensor_parallel" in str(table):
            return nullcontext()
        flags = {
            f"--{name.replace('_', '-')}": each for name, each in list_options(Settings).items()
        }
        server: dict[str, Any] = {
            each.name: each.kind is bool or each.kind(values[flag] or "")
            for flag, each in flags.items()
            if flag in values
        }
        settings = Settings(**table.get("server", {}) | server)
        settings.check_access()
    except (ValueError, TypeError):
        return nullcontext()
    return start_server(settings)


def show_version(requested: bool) -> None:
    """Print the version and exit."""
    if requested:
        print(f"outpace {__version__}")
        raise Exit


def outpace(
    version: Annotated[
        bool,
        Option(
            "--version", help="Print the version and exit.", callback=show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Parallel decoding of language models: several tokens per forward pass."""


def run_command(command: Any, words: Sequence[str], start: Any = None) -> int:
    """Run a command, with the server that `serve` continues; `ValueError` for invalid usage."""
    try:
        return command.main([*words], prog_name="outpace", standalone_mode=False, obj=start) or 0
    except UsageError as error:
        raise ValueError(error.format_message() + suggest_method(error, words)) from error
    except RuntimeError as error:
        from outpace.engine.job import DecodingError  # already loaded if one was raised

        if isinstance(error, DecodingError):
            exit_with_error(str(error), FAILED)
        raise


def suggest_method(error: BadParameter, words: Sequence[str]) -> str:
    """Return which `--method` has a flag that is unknown without it; empty if there is none."""
    option = getattr(error, "option_name", "").removeprefix("--").replace("-", "_")
    flags = () if error.ctx is None else (flag.name for flag in error.ctx.command.params)
    if not option or "method" not in flags or "--method" in flag_values(words):
        return ""
    from outpace.field_types import list_options
    from outpace.methods import METHODS  # their options load PyTorch

    names = [name for name, kind in METHODS.items() if option in list_options(kind)]
    return f"; with --method, it is an option of {', '.join(names)}" if names else ""
