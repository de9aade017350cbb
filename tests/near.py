"""Print the test files near a change: python tests/near.py [COMMIT].

A room is a folder or file directly under the package. Near are the tests in the folders of the
changed rooms and of the rooms above them, tests elsewhere that import one of these, and changed
tests. The change is the one since COMMIT, by default since the last commit; without one, that of
the last commit.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from source import MODULES, imported, part

TESTS = Path(__file__).parent
ROOT = TESTS.parent
OTHERS = {
    "README.md": "test_docs.py",
    "CONTRIBUTING.md": "test_docs.py",
    "docs": "test_docs.py",
    "examples": "test_examples.py",
    "benchmarks": "benchmarks",
    "deploy": "test_containerfile.py",
    "pyproject.toml": "test_packaging.py",
    "Makefile": "test_docs.py",
}
"""Tests of files outside the package."""


@cache
def arrows() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {part(module): set() for module in MODULES}
    for module, tree in MODULES.items():
        graph[part(module)] |= imported(module, tree) & graph.keys()
    return graph


def rooms_above(rooms: Iterable[str]) -> dict[str, int]:
    """Return rooms and those that import them, also through others, with their distance."""
    distances = dict.fromkeys(rooms, 0)
    queue = [*distances]
    for room in queue:
        for other, below in arrows().items():
            if room in below and other not in distances:
                distances[other] = distances[room] + 1
                queue.append(other)
    return distances


@cache
def imported_rooms(path: Path) -> frozenset[str]:
    """Return the rooms that a test file imports, itself or through helpers of the tests."""
    tree = ast.parse(path.read_text())
    rooms = imported(path.name, tree)
    for helper in imported_helpers(tree):
        rooms |= imported_rooms(helper)
    return frozenset("api" if room == "__init__" else room for room in rooms)


def imported_helpers(tree: ast.Module) -> set[Path]:
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return {path for name in names if (path := TESTS / f"{name}.py").is_file()}


def near_tests(changed: Iterable[str]) -> list[str]:
    """Return the test files near changed files, the nearest first; paths relative to the root."""
    paths = [Path(path) for path in changed]
    rooms = rooms_above({part("/".join(p.parts[2:])) for p in paths if p.parts[:1] == ("src",)})
    helpers = {ROOT / p for p in paths if p.parent == Path("tests") and p.suffix == ".py"}
    others = [TESTS / OTHERS[p.parts[0]] for p in paths if p.parts[0] in OTHERS]
    found: dict[Path, int] = {}
    for test in TESTS.rglob("test_*.py"):
        folder = test.relative_to(TESTS).parts[0]
        own = imported_rooms(test) | {folder}
        helped = helpers & imported_helpers(ast.parse(test.read_text()))
        if test.relative_to(ROOT) in paths:
            found[test] = 0
        elif helped or any(test.is_relative_to(other) for other in others):
            found[test] = 1
        elif own & rooms.keys():
            found[test] = rooms.get(folder, len(arrows()))
    return [str(test.relative_to(ROOT)) for test in sorted(found, key=lambda t: (found[t], t))]


def changed_files(commit: str | None) -> list[str]:
    """Return the paths that differ from a commit, new files included."""
    lines = git("diff", "--name-only", commit or "HEAD")
    lines += git("ls-files", "--others", "--exclude-standard")
    return lines or git("diff", "--name-only", "HEAD~1")


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip())
    return done.stdout.splitlines()


if __name__ == "__main__":
    print(*near_tests(changed_files(next(iter(sys.argv[1:]), None))))
