"""Which tests the short suite runs; `pytest --nightly` runs all.

The short suite leaves out tests with the mark `nightly`, all but pairwise combinations of a grid of
three or more parameters, and all but a tenth of the cases of a test with the mark `sampled`.
"""

import subprocess
from collections import defaultdict
from collections.abc import Hashable, Sequence
from hashlib import sha256
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest

SHARE = 10
"""One of this many cases of a sampled test runs."""


def current_commit() -> str:
    """Return the hash of the checked-out commit, or `none` outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def select_pairs(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the indices of rows that together hold each pair of values of any two columns."""
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: (len(pairs[index] & missing), -index))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def is_grid(rows: Sequence[Sequence[Hashable]]) -> bool:
    """Return whether rows are all combinations of the values of three or more columns."""
    sizes = [len(set(column)) for column in zip(*rows, strict=True)]
    return sum(size > 1 for size in sizes) >= 3 and prod(sizes) == len(rows)


def parameters(item: Any) -> tuple[Hashable, ...]:
    """Return a test's parameters; those that are not hashable by identity."""
    values = item.callspec.params.values()
    return tuple(v if isinstance(v, str | int | float | None) else id(v) for v in values)


def is_sampled(item: pytest.Item, seed: str) -> bool:
    """Return whether a seed selects a case of a sampled test."""
    digest = sha256(f"{seed} {item.nodeid}".encode()).digest()
    return int.from_bytes(digest[:8]) % SHARE == 0


def select_short(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    grids: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            grids[str(item.path), item.nodeid.partition("[")[0]].append(item)
    left_out = {item for item in items if item.get_closest_marker("nightly")}
    for cases in grids.values():
        rows = [parameters(case) for case in cases]
        if is_grid(rows):
            pairs = select_pairs(rows)
            left_out.update(case for index, case in enumerate(cases) if index not in pairs)
    for item in items:
        if item.get_closest_marker("sampled") and not is_sampled(item, seed):
            left_out.add(item)
    return [item for item in items if item not in left_out]
