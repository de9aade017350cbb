"""Where a result came from: revision, versions, machine, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from outpace.version import __version__


def provenance(secret: str | None = None) -> dict[str, Any]:
    """What decides the numbers of a run, for the JSON that they are written to.

    Absolute paths of the command are cut to their last part, and a `secret` in it is left out.
    """
    return {
        "outpace": __version__,
        "revision": revision(),
        "command": [shown(word, secret) for word in sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in loads()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def shown(word: str, secret: str | None) -> str:
    """A word of the command as it is written down."""
    cut = Path(word).name if os.path.isabs(word) else word
    return cut.replace(secret, "…") if secret else cut


def revision() -> str | None:
    """Commit of the source tree, `+` where it was changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def loads() -> tuple[float, ...]:
    """Processes that ran or waited over 1, 5 and 15 minutes; none where the system counts none."""
    try:
        return os.getloadavg()
    except (AttributeError, OSError):  # Windows
        return ()


def processor() -> str:
    """Name of the CPU."""
    described = Path("/proc/cpuinfo")
    if described.is_file():
        for line in described.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
