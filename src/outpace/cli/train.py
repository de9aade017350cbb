"""The command that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def train_command(
    recipe: Annotated[Path, Argument(help="TOML file of a training.")],
    overrides: Annotated[list[str] | None, Argument(help="key=value, dotted.")] = None,
    processes: Annotated[int, Option(help="Processes that share each step.")] = 1,
) -> None:
    """Train what a recipe says; a run that was stopped goes on from its last checkpoint.

    Ctrl-C ends it after the step that runs, with a checkpoint; a second one ends it at once.
    """
    try:
        from outpace.training.recipe import train
    except ImportError as error:
        raise ValueError(f"{error}; training needs: pip install 'outpace[train]'") from error
    train(recipe, overrides or [], processes)
