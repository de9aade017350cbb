"""What a run sets up: freed memory is used again."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from outpace.training.run_setup import keep_freed_memory

if sys.argv[1:]:
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):
    torch.ones(10 << 20)
before = faults()
for _ in range(32):
    torch.ones(10 << 20)
print(faults() - before)
"""


def count_faults(*arguments: str) -> int:
    """Return the page faults of 32 tensors of 40 MB, one after another."""
    command = [sys.executable, "-c", STEPS, *arguments]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_kept() -> None:
    pages = (40 << 20) // resource.getpagesize()
    assert count_faults("keep") < 4 * pages < count_faults()
