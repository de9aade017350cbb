"""Provenance of a result: revision, versions, machine, command."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outpace.measurements import cpu_model
from outpace.version import __version__


def provenance_record() -> dict[str, Any]:
    """Return what determines the numbers of a run, as JSON fields.

    Absolute paths in the command are reduced to their last part.
    """
    import numpy
    import torch

    return {
        "outpace": __version__,
        "revision": source_revision(),
        "command": [redact_argument(word) for word in sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": numpy.__version__,
        "processor": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in load_averages()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def redact_argument(argument: str) -> str:
    """Return one word of the command line without absolute folders."""
    # A word may be a model with its method, `MODEL METHOD draft=PATH`, or a path with spaces.
    parts = [argument] if os.path.exists(argument) else re.split(r"([\s=]+)", argument)
    return "".join(Path(part).name if os.path.isabs(part) else part for part in parts)


def source_revision() -> str | None:
    """Return the commit of the source tree, with `+` if modified; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def load_averages() -> tuple[float, ...]:
    """Return the load averages over 1, 5 and 15 minutes; empty where unavailable."""
    try:
        return os.getloadavg()
    except (AttributeError, OSError):  # Windows
        return ()
