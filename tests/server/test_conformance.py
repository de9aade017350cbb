"""Conformance with several releases of the official client, each in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asking import PAIRS
from server.test_run import serving

ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(__file__).parent / "conformance.py"
OLD = ROOT / ".venv" / "openai2"


@pytest.mark.parametrize(
    "release",
    [pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)],
)
def test_client_is_served(release: int) -> None:
    env = dict(os.environ)
    if release == 2:
        assert OLD.exists(), "no second release of the client: run `make .venv/nightly`"
        env["PYTHONPATH"] = str(OLD)
    with serving("--drain-seconds", "1") as server:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), server.url], env=env, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    *pairs, last = done.stdout.splitlines()
    assert last.startswith(f"openai {release}.")
    assert len(pairs) >= len(PAIRS) and {*pairs} >= {" ".join(pair) for pair in PAIRS}
