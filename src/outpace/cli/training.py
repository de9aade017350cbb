"""Commands that train: `train`, and `recipes`, which says what can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from rich.table import Table
from typer import Argument, Context, Option, Typer

from outpace import recipes
from outpace.cli.draw import console


def train_command(
    recipe: Annotated[str, Argument(help="TOML file of a training, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, Argument(help="key=value, dotted.")] = None,
    processes: Annotated[int, Option(help="Processes that share each step.")] = 1,
    plan: Annotated[bool, Option("--plan", help="Say what it needs, and train nothing.")] = False,
) -> None:
    """Train what a recipe says; a run that was stopped goes on from its last checkpoint.

    Ctrl-C and SIGTERM end it after the step that runs, with a checkpoint; a second one at once.
    """
    if not plan:
        train(recipe, overrides or [], processes)
        return
    with needing_extra():
        import torch

        from outpace.training.host import describe_processor
        from outpace.training.plan import Planner
        from outpace.training.recipe import load
    table = Table(box=None, show_header=False, pad_edge=False)
    planner = Planner(load(recipe, overrides or []))
    plan_of_run = planner.plan(processes)
    for name, text in plan_of_run.described():
        table.add_row(name, text)
    if not torch.accelerator.is_available():
        table.add_row("here", describe_processor(plan_of_run))
    for name, text in planner.spread(processes):
        table.add_row(name, text)
    console.print(table)


def train(recipe: str, overrides: Sequence[str], processes: int = 1) -> None:
    """Train a recipe; `ValueError` where it cannot be, or what trains is not installed."""
    with needing_extra():
        from outpace.training import recipe as recipes_of
    recipes_of.train(recipe, overrides, processes)


@contextmanager
def needing_extra() -> Iterator[None]:
    """Imports of what trains; `ValueError` where that is not installed."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{error}; training needs: pip install 'outpace[train]'") from error


def recipes_group() -> Typer:
    """The recipes that ship inside the package; `show NAME` prints one."""
    app = Typer(add_completion=False, invoke_without_command=True)
    app.callback()(list_recipes)
    app.command("show")(show_recipe)
    return app


def list_recipes(context: Context) -> None:
    """The recipes that ship inside the package."""
    if context.invoked_subcommand is None:
        table = Table(header_style="bold")
        table.add_column("recipe", no_wrap=True)
        table.add_column("trains")
        for name in recipes.names():
            table.add_row(name, recipes.about(name))
        console.print(table)


def show_recipe(
    name: Annotated[str, Argument(help="One of those that `outpace recipes` lists.")],
) -> None:
    """Print a recipe, to be changed and kept."""
    try:
        print(recipes.find(name).read_text(encoding="utf-8"), end="")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no recipe, which is text: {error}") from error
