"""Write prompts for training a draft on code: functions of installed packages, questions, tasks.

    python examples/code_prompts.py --package python --package numpy --output prompts.jsonl

Functions are those of Python's standard library (`python`) and of installed packages with a
permissive licence. Only signature and docstring are used; nothing is imported or downloaded.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution
from itertools import product
from pathlib import Path
from random import Random

PERMISSIVE = ("mit", "bsd", "apache", "isc", "python software foundation", "psf")
"""Words in the licences of packages that are used."""

SKIPPED_FOLDERS = {"test", "tests", "testing", "site-packages", "idlelib", "lib2to3", "__pycache__"}

DOCSTRING_CHARACTERS = 40, 700
"""Shortest and longest docstring; others explain too little, or make long prompts."""

KINDS = {"functions": 6000, "requests": 1500, "questions": 2500}
"""Prompts of each kind, unless the flags of these names give others."""

REQUESTS = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}. Add type hints and a docstring.",
    "Write a Python function that {task}, and show how it is called.",
    "Write a short Python class that {task}.",
    "Explain step by step how a program {task}, then write it in Python.",
    "Write unit tests for a Python function that {task}.",
)
TASKS = (
    *("removes duplicates from {items} without changing their order", "sorts {items} by length"),
    *("groups {items} by their first element", "counts how often each value occurs in {items}"),
    *("finds the largest and the smallest of {items}", "splits {items} into parts of equal size"),
    *("merges two lists of {items}", "reads {items} from a CSV file", "writes {items} to JSON"),
    *("checks whether {items} are in ascending order", "returns every second of {items}"),
    *("finds {items} that occur in both of two lists", "prints {items} as a table"),
    *("rotates {items} by k places", "validates {items} and reports the invalid ones"),
    *("caches the results of a computation on {items}", "iterates over {items} in batches"),
    *("converts {items} to a dictionary", "searches {items} by binary search"),
    *("computes running totals of {items}", "flattens nested lists of {items}"),
)
ITEMS = (
    *("integers", "strings", "dates", "pairs of numbers", "file names", "words", "records"),
    *("e-mail addresses", "temperatures", "prices", "tuples", "log lines", "student grades"),
)


def iterate_functions(path: Path) -> Iterator[str]:
    """Yield a prompt for each public function of a file that has arguments and a docstring."""
    try:
        module = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError, OSError):
        return  # files for other versions of Python, and of other encodings
    shortest, longest = DOCSTRING_CHARACTERS
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node) or ""
        if node.args.args and shortest <= len(docstring) <= longest:
            node.decorator_list, node.body = [], node.body[:1]
            yield f"Complete this function:\n\n```python\n{ast.unparse(node)}\n```"


def list_sources(root: Path, paths: Sequence[Path]) -> list[Path]:
    """Return the source files among paths under a folder, except tests."""
    return sorted(
        path
        for path in paths
        if path.suffix == ".py" and not SKIPPED_FOLDERS & {*path.relative_to(root).parts}
    )


def package_sources(name: str) -> list[Path]:
    """Return the source files of a package; `ValueError` unless its licence is permissive."""
    if name == "python":
        library = Path(sysconfig.get_path("stdlib"))
        return list_sources(library, [*library.rglob("*.py")])
    package = distribution(name)
    if not (licence := find_licence(package)):
        raise ValueError(f"the licence of {name} is not permissive or not stated; leave it out")
    root = Path(str(package.locate_file("")))
    print(f"{name} {package.version}: {licence}", file=sys.stderr)
    return list_sources(
        root, [root / file for file in package.files or () if ".." not in file.parts]
    )


def find_licence(package: Distribution) -> str | None:
    """Return the permissive licence that a package states, if any."""
    fields = package.metadata
    stated = [fields[name] or "" for name in ("License-Expression", "License") if name in fields]
    stated += [each for each in fields.get_all("Classifier") or () if each.startswith("License")]
    for text in stated:
        line = text.partition("\n")[0]
        if any(word in line.lower() for word in PERMISSIVE) and "gpl" not in line.lower():
            return line
    return None


def iterate_requests() -> Iterator[str]:
    """Yield the requests made from templates."""
    for request, task, items in product(REQUESTS, TASKS, ITEMS):
        yield request.format(task=task.format(items=items))


def read_questions(path: Path) -> Iterator[str]:
    """Yield the field `question` of each line of a file."""
    for line in path.read_text("utf-8").splitlines():
        yield json.loads(line)["question"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the prompts, or print one of each kind without --output."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--package", action="append", default=[], help="may be repeated")
    parser.add_argument("--input", type=Path, help="JSON lines with a field question")
    parser.add_argument("--output", type=Path)
    for kind, count in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=count, help="prompts of this kind")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    sources = [path for name in flags.package for path in package_sources(name)]
    found = {
        "functions": [prompt for path in sources for prompt in iterate_functions(path)],
        "requests": [*iterate_requests()],
        "questions": [*read_questions(flags.input)] if flags.input else [],
    }
    random, chosen = Random(flags.seed), list[str]()
    for kind, prompts in found.items():
        unique = [*dict.fromkeys(prompts)]
        sample = random.sample(unique, min(len(unique), getattr(flags, kind)))
        print(
            f"{len(sample)} of {len(unique)} {kind}"
            + (f", such as:\n{sample[0]}\n" if sample else "")
        )
        chosen += sample
    random.shuffle(chosen)  # every part of the file has all kinds
    if flags.output is not None:
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in chosen)
        flags.output.write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main()
