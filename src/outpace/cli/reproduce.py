"""The command `reproduce`, which is part of the repository and not of the installed package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated

from typer import Argument, Typer

FOLDER = Path(__file__).parents[3] / "benchmarks" / "reproduce"
"""Where a clone has it, whose package is installed editable."""

NEED = (
    "needs a clone of the repository, because an installed package does not have the figures. "
    "Get the repository, and in its folder run: pip install --editable ."
)


def reproduce() -> Callable[..., None] | Typer:
    """Figures of a paper, measured again beside the published points.

    Returns the command of the clone, or one that reports what is missing.
    """
    init = FOLDER / "__init__.py"
    if not init.is_file():
        return command_without_clone()
    if "reproduce" not in sys.modules:
        # By its path, since further programs beside it must not hide modules of others.
        spec = spec_from_file_location("reproduce", init)
        assert spec is not None and spec.loader is not None
        package = sys.modules["reproduce"] = module_from_spec(spec)
        spec.loader.exec_module(package)
    command: Callable[..., None] = import_module("reproduce.command").reproduce
    return command


def command_without_clone() -> Typer:
    """Return a command that takes any words, and whose help names what it needs."""
    app = Typer(add_completion=False)
    about = f"Figures of a paper, measured again beside the published points.\n\nThis {NEED}"

    @app.command("reproduce", help=about, context_settings={"ignore_unknown_options": True})
    def refuse(
        words: Annotated[list[str] | None, Argument(help="PAPER or PAPER:FIGURE.")] = None,
    ) -> None:
        raise ValueError(f"reproduce {NEED}")

    return app
