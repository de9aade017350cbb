"""The command-line application, which imports only the command that is run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from typer import BadParameter, Exit, Option, Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from outpace.cli.terminal import FAILED, buffer_typed_input, exit_with_error, show_startup_spinner
from outpace.version import __version__

# Typer exports only the subclass `BadParameter`; its base covers all usage errors.
UsageError = cast(type[BadParameter], BadParameter.__mro__[1])

COMMANDS = {
    "generate": "outpace.cli.answer:generate",
    "chat": "outpace.cli.chat:chat",
    "race": "outpace.cli.measure:race",
    "trace": "outpace.cli.answer:trace",
    "evaluate": "outpace.cli.measure:evaluate_command",
    "report": "outpace.cli.report:report",
    "tune": "outpace.cli.tune:tune",
    "reproduce": "outpace.cli.reproduce:reproduce",
    "serve": "outpace.cli.serve:serve",
    "data": "outpace.cli.data:data",
    "train": "outpace.cli.training:train_command",
    "quantize": "outpace.cli.quantize:quantize",
    "models": "outpace.cli.lists:models",
    "methods": "outpace.cli.lists:methods",
}
"""Module and function of each command."""

BENCHMARK_COMMANDS = {
    "methods": "outpace.cli.sides:benchmark_methods",
    "serve": "outpace.cli.benchmark:benchmark_serve",
}
"""Commands of the group `benchmark`."""

GROUP_COMMANDS = {"recipes": "outpace.cli.training:recipes_group"}
"""Functions that create a group of commands."""

COMMAND_FACTORIES = ("recipes",)
"""Commands whose function returns the command itself."""

INTERACTIVE_COMMANDS = ("chat",)
"""Commands that read typed input after loading."""

VALUE_TYPE_NAMES = {"int": "an integer", "float": "a number"}
"""Types of values in words; other types keep pydantic's name."""

Params = TypeVar("Params", bound=Sequence[Any])


class CommandGroup(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> Any:
        """Return the flags of the group."""
        return hide_flag_types(super().get_params(ctx))


class LoadedCommand(TyperCommand):
    """A command that has been imported."""

    def get_params(self, ctx: Any) -> Any:
        """Return its arguments and flags."""
        return hide_flag_types(super().get_params(ctx))


class LazyCommand(TyperCommand):
    """A command that is imported when it is run; before, only its name and help are loaded."""

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name, help=read_docstring(place))
        self.location = place

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Load the command, with the flags of the method in `args`, and create its context."""
        completes = extra.get("resilient_parsing")
        if self.name in INTERACTIVE_COMMANDS and not completes:
            buffer_typed_input()  # before PyTorch, which takes seconds
        with nullcontext() if completes else show_startup_spinner("loading PyTorch"):
            command = self.load_command(find_method_name(args))
        return command.make_context(info_name, args, parent, **extra)

    def load_command(self, method: str | None) -> Any:
        """Import the command."""
        from outpace.cli.options import add_method_flags, expand_groups

        module, _, name = self.location.partition(":")
        loaded = getattr(import_module(module), name)
        if self.name in COMMAND_FACTORIES:
            loaded = loaded()
        if isinstance(loaded, Typer):
            return get_command(loaded)
        function = expand_groups(loaded)
        if "method" in inspect.signature(function).parameters:
            function = add_method_flags(function, method)
        app = Typer(add_completion=False)
        app.command(self.name, cls=LoadedCommand)(function)
        return get_command(app)


def hide_flag_types(params: Params) -> Params:
    """Remove the type from the help of flags that take no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def read_docstring(place: str) -> str:
    """Read the docstring of a function without importing its module."""
    module, _, name = place.partition(":")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text("utf-8")).body
    (function,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)
    return ast.get_docstring(function) or ""


def find_method_name(args: Sequence[str]) -> str | None:
    """Return the value of `--method` in a list of arguments."""
    for arg, following in zip_longest(args, args[1:]):
        if arg.startswith("--method="):
            return arg.partition("=")[2]
        if arg == "--method":
            return following
    return None


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


def build_app() -> TyperGroup:
    """Build the application."""
    app = Typer(context_settings={"help_option_names": ["-h", "--help"]})
    app.callback(cls=CommandGroup)(outpace)
    root = cast(TyperGroup, get_command(app))
    benchmarks = CommandGroup(name="benchmark", help="Benchmark methods or a server.")
    for group, commands in ((root, COMMANDS | GROUP_COMMANDS), (benchmarks, BENCHMARK_COMMANDS)):
        for name, place in commands.items():
            group.add_command(LazyCommand(name, place))
    root.add_command(benchmarks)
    return root


def run_command(words: list[str]) -> int:
    """Run a command and return its exit status; raises `ValueError` for invalid usage."""
    try:
        return build_app().main(words, prog_name="outpace", standalone_mode=False) or 0
    except UsageError as error:
        raise ValueError(describe_usage_error(error)) from error
    except RuntimeError as error:
        from outpace.engine.job import DecodingError  # already loaded if one was raised

        if isinstance(error, DecodingError):
            exit_with_error(str(error), FAILED)
        raise


def describe_usage_error(error: Any) -> str:
    """Describe a usage error, with the parameter and the value.

    Recent versions of Typer omit the value for a wrong type; the pydantic error that caused it has
    it.
    """
    list_errors = getattr(error.__cause__, "errors", None)
    if list_errors is None:
        return error.format_message()
    fault = list_errors()[0]
    kind = fault["type"].partition("_")[0]
    return (
        f"{error.param.opts[0]} must be {VALUE_TYPE_NAMES.get(kind, kind)}, got {fault['input']!r}"
    )
