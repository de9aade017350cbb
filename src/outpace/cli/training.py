"""Commands of training: `train` and `recipes`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from rich.table import Table
from typer import Argument, Context, Option, Typer

from outpace import recipes
from outpace.cli.draw import console
from outpace.errors import install_extra


def train_command(
    recipe: Annotated[str, Argument(help="TOML file, or name of an included recipe.")],
    overrides: Annotated[
        list[str] | None, Argument(help="Overrides key=value, with dotted keys.")
    ] = None,
    processes: Annotated[int, Option(help="Number of processes.")] = 1,
) -> None:
    """Train with a recipe; a run that was stopped continues from its last checkpoint.

    Ctrl-C or SIGTERM stops after the current step and saves a checkpoint; a second one stops at
    once.
    """
    run_training(recipe, overrides or [], processes)


def run_training(recipe: str, overrides: Sequence[str], processes: int = 1) -> None:
    """Train with a recipe; raises `ValueError` if it is invalid or an extra is not installed."""
    with require_train_extra():
        from outpace.training import recipe as recipes_of
    recipes_of.train_recipe(recipe, overrides, processes)


@contextmanager
def require_train_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{error}; training {install_extra('train')}") from error


def recipes_group() -> Typer:
    """List the included recipes; `show NAME` prints one."""
    app = Typer(add_completion=False, invoke_without_command=True)
    app.callback()(list_recipes)
    app.command("show")(print_recipe)
    return app


def list_recipes(context: Context) -> None:
    """List the included recipes; `show NAME` prints one."""
    if context.invoked_subcommand is None:
        table = Table(header_style="bold")
        table.add_column("recipe", no_wrap=True)
        table.add_column("trains")
        for name in recipes.recipe_names():
            table.add_row(name, recipes.recipe_summary(name))
        console.print(table)


def print_recipe(name: Annotated[str, Argument(help="Name listed by `outpace recipes`.")]) -> None:
    """Print a recipe, for copying and editing."""
    try:
        print(recipes.find_recipe(name).read_text(encoding="utf-8"), end="")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a recipe, which must be text: {error}") from error
