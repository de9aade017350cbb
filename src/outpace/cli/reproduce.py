"""The command `reproduce`, which needs the repository in addition to the installed package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

REPRODUCE_FOLDER = Path(__file__).parents[3] / "benchmarks" / "reproduce"
"""Its folder in a clone whose package is installed as editable."""


def reproduce() -> Callable[..., None]:
    """Reproduce the figures of a paper, next to the published points.

    Returns the command of the clone; raises `ValueError` if there is none.
    """
    init = REPRODUCE_FOLDER / "__init__.py"
    if not init.is_file():
        raise ValueError(
            "reproduce needs a clone of the repository: the installed package does not include the "
            "figures. Clone it, then run in its folder: pip install --editable ."
        )
    if "reproduce" not in sys.modules:
        # Imported by path: other programs next to it must not shadow modules.
        spec = spec_from_file_location("reproduce", init)
        assert spec is not None and spec.loader is not None
        package = sys.modules["reproduce"] = module_from_spec(spec)
        spec.loader.exec_module(package)
    command: Callable[..., None] = import_module("reproduce.command").reproduce
    return command
