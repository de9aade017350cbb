"""The faults of `make mutants`."""

import shutil
import subprocess

import pytest

from shown import ROOT


@pytest.mark.skipif(not shutil.which("patch"), reason="no patch: apt-get install patch")
def test_each_fault_can_be_put_into_the_package() -> None:
    for patch in sorted((ROOT / "tests" / "mutants").glob("*.patch")):
        command = ["patch", "--dry-run", "--strip=1", "--input", patch]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, (patch.name, run.stdout)
