"""The commands, of which only the one that is called is imported."""

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

from outpace.cli.exit import FAILED, fail
from outpace.cli.keyboard import hold_typed
from outpace.cli.terminal import loading
from outpace.version import __version__

# Typer offers the last of these by name and the whole of them to nobody.
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
    "train": "outpace.cli.training:train_command",
    "quantize": "outpace.cli.quantize:quantize",
    "models": "outpace.cli.lists:models",
    "methods": "outpace.cli.lists:methods",
}
"""Where each is: module and function."""

BENCHMARKS = {
    "methods": "outpace.cli.sides:benchmark_methods",
    "serve": "outpace.cli.benchmark:benchmark_serve",
}
"""Commands of the group `benchmark`."""

GROUPS = {"recipes": "outpace.cli.training:recipes_group"}
"""Functions that make commands under one name."""

MAKERS = ("recipes", "reproduce")
"""Commands whose function is called to get the command itself."""

CONVERSATIONS = ("chat",)
"""Commands that read what is typed after they have loaded."""

KINDS = {"int": "a whole number", "float": "a number"}
"""Types of values, in words; others stay as pydantic names them."""

Params = TypeVar("Params", bound=Sequence[Any])


class Group(TyperGroup):
    """Commands under one name."""

    def get_params(self, ctx: Any) -> Any:
        """Flags of the group itself."""
        return bare(super().get_params(ctx))


class Command(TyperCommand):
    """A command that was imported."""

    def get_params(self, ctx: Any) -> Any:
        """Its arguments and flags."""
        return bare(super().get_params(ctx))


class Deferred(TyperCommand):
    """A command of which only name and help are known until it is called."""

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name, help=documentation(place))
        self.place = place

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """That of the command itself, with the flags of the method that `args` name."""
        completes = extra.get("resilient_parsing")
        if self.name in CONVERSATIONS and not completes:
            hold_typed()  # before PyTorch, which takes seconds
        with nullcontext() if completes else loading("loading PyTorch"):
            command = self.load(named(args))
        return command.make_context(info_name, args, parent, **extra)

    def load(self, method: str | None) -> Any:
        """The command itself."""
        from outpace.cli.options import spread, with_method

        module, _, name = self.place.partition(":")
        found = getattr(import_module(module), name)
        if self.name in MAKERS:
            found = found()
        if isinstance(found, Typer):
            return get_command(found)
        function = spread(found)
        if "method" in inspect.signature(function).parameters:
            function = with_method(function, method)
        app = Typer(add_completion=False)
        app.command(self.name, cls=Command)(function)
        return get_command(app)


def bare(params: Params) -> Params:
    """Flags that take no value, without a word for its type in their help."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def documentation(place: str) -> str:
    """The docstring of a function, read and not imported."""
    module, _, name = place.partition(":")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text("utf-8")).body
    (function,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)
    return ast.get_docstring(function) or ""


def named(args: Sequence[str]) -> str | None:
    """Value of `--method` in a list of arguments."""
    for arg, after in zip_longest(args, args[1:]):
        if arg.startswith("--method="):
            return arg.partition("=")[2]
        if arg == "--method":
            return after
    return None


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(f"outpace {__version__}")
        raise Exit


def outpace(
    version: Annotated[
        bool, Option("--version", help="Show it and end.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Parallel decoding of language models: several tokens per forward pass."""


def build() -> TyperGroup:
    """The application."""
    app = Typer(context_settings={"help_option_names": ["-h", "--help"]})
    app.callback(cls=Group)(outpace)
    root = cast(TyperGroup, get_command(app))
    benchmarks = Group(name="benchmark", help="Measure for comparison.")
    for group, commands in ((root, COMMANDS | GROUPS), (benchmarks, BENCHMARKS)):
        for name, place in commands.items():
            group.add_command(Deferred(name, place))
    root.add_command(benchmarks)
    return root


def run(words: list[str]) -> int:
    """Run a command; its exit status. Raises `ValueError` for words that are no command."""
    try:
        return build().main(words, prog_name="outpace", standalone_mode=False) or 0
    except UsageError as error:
        raise ValueError(plainly(error)) from error
    except RuntimeError as error:
        from outpace.engine.job import DecodingError  # loaded already where one was raised

        if isinstance(error, DecodingError):
            fail(str(error), FAILED)
        raise


def plainly(error: Any) -> str:
    """What is wrong with words, and with which: recent Typer does not tell a value of wrong type.

    Its reason then is the error of pydantic that it was made of.
    """
    listed = getattr(error.__cause__, "errors", None)
    if listed is None:
        return error.format_message()
    fault = listed()[0]
    kind = fault["type"].partition("_")[0]
    return f"{error.param.opts[0]} takes {KINDS.get(kind, kind)}, not {fault['input']!r}"
