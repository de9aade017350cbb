"""Memory of tensors: huge pages where the system has them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TENSORS = """
import resource, torch, outpace.kernels.memory

faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(8):
    torch.ones(10 << 20)
print(faults() - before)
"""


def count_faults(**environment: str) -> int:
    """Return the page faults of eight tensors of 40 MB, one after another."""
    run = subprocess.run(
        [sys.executable, "-c", TENSORS],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(),
    reason="the system has no huge pages, or gives them to all",
)
def test_tensors_are_on_huge_pages_unless_a_user_declines() -> None:
    small_pages = 8 * (40 << 20) // resource.getpagesize()
    assert count_faults() < small_pages / 8
    assert count_faults(THP_MEM_ALLOC_ENABLE="0") > small_pages / 2
