"""Write prompts for training a draft: code, edits of code, questions, prose, records, queries.

    python examples/draft_prompts.py --package python --package numpy --output prompts.jsonl

Functions are those of Python's standard library (`python`) and of installed packages with a
permissive licence; those to complete have only signature and docstring. Nothing is imported or
downloaded.
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

EDITED_CHARACTERS = 300, 1500
"""Shortest and longest function that is edited."""

KINDS = {
    "functions": 6000,
    "requests": 1500,
    "questions": 2500,
    "edits": 1500,
    "prose": 1500,
    "records": 1000,
    "queries": 200,
}
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

EDITS = (
    "Add type hints to this function.",
    "Add a docstring that explains the arguments and the result. Change nothing else.",
    "Rename {name} to {other} everywhere. Answer with the whole function.",
    "Rename the argument {argument} to value. Answer with the whole function.",
    "Add a comment to each step of this function.",
    "Raise a ValueError with a clear message where {argument} is None.",
    "Find the mistakes in this function and return it corrected.",
    "Print {argument} at the beginning, and change nothing else.",
)
PROSE = (
    "Write a short story about {topic}.",
    "Explain {topic} in a few paragraphs.",
    "Write an e-mail to a colleague about {topic}.",
    "Give five tips about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Write the introduction of an article on {topic}.",
    "Describe {topic} to a child of eight.",
    "Summarize in one paragraph what people should know about {topic}.",
)
SUBJECTS = (
    *("a morning at the harbour", "learning an instrument", "the history of bread", "a lost key"),
    *("working from home", "how vaccines work", "keeping bees", "a train that came too late"),
    *("planning a garden", "solar power", "the first day at school", "repairing a bicycle"),
    *("moving to another city", "the water cycle", "a meeting that was moved", "reading maps"),
    *("sleeping well", "the invention of paper", "an old neighbour", "saving money"),
)
PLACES = (
    *("in winter", "in a small town", "for beginners", "on an island", "a hundred years ago"),
    *("with little time", "in a big family", "today", "without a computer", "near a river"),
)
RECORDS = (
    "Return {what} as JSON with the fields {fields}: {text}",
    "Extract {what} from the text. Answer only with JSON that has {fields}.\n\n{text}",
    "Make up three examples of {what} and give them as a JSON array of objects with {fields}.",
)
THINGS = {
    "the order": ("customer, article, amount and price", "{name} orders {n} {thing} at {m} euros."),
    "the person": ("name, age and city", "{name}, who is {n}, moved to {city} {m} years ago."),
    "the booking": (
        "guest, city, nights and rooms",
        "{name} books {m} nights in {city}, {n} rooms.",
    ),
    "the review": (
        "author, product, stars and text",
        "{name} gives the {thing} {m} of 5: too loud.",
    ),
    "the visit": ("patient, city and minutes", "{name} came from {city} and stayed {n} minutes."),
}
NAMES = (
    *("Ada Klein", "Omar Haddad", "Ines Duarte", "Jon Falk", "Priya Nair", "Lena Vogt"),
    *("Sam Okoro", "Yuki Mori", "Ivan Petrov", "Clara Rossi", "Max Weber", "Noor Aziz"),
)
CITIES = "Lyon", "Porto", "Bergen", "Graz", "Kyoto", "Cusco", "Accra", "Tampere", "Gdansk", "Izmir"
GOODS = "lamps", "keyboards", "chairs", "bottles", "tents", "drills", "notebooks", "clocks"
QUERIES = (
    "Write an SQL query that {task}.\n\n{table}",
    "Write an SQL query that {task}, and explain it.\n\n{table}",
    "Write the SQL statement that creates this table, then a query that {task}.\n\n{table}",
)
QUESTIONS_OF_TABLES = (
    *("returns the ten highest values of {number}", "counts the rows per {group}"),
    *("averages {number} per {group}", "finds {group} without any row in the last month"),
    *("returns each {group} with its share of the sum of {number}", "ranks {group} by {number}"),
    *("deletes rows where {number} is missing", "returns rows whose {number} is above average"),
    *("compares {number} of each month with the month before", "lists {group} that occur twice"),
)
TABLES = {
    "orders(id, customer, article, amount, price, ordered_at)": ("price", "customer"),
    "employees(id, name, department, salary, hired_at)": ("salary", "department"),
    "trips(id, driver, start, destination, kilometres, started_at)": ("kilometres", "driver"),
    "exams(id, student, subject, points, taken_at)": ("points", "subject"),
    "visits(id, patient, doctor, minutes, visited_at)": ("minutes", "doctor"),
    "downloads(id, user, file, bytes, downloaded_at)": ("bytes", "file"),
    "readings(id, sensor, room, temperature, read_at)": ("temperature", "room"),
}


def walk_functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Yield the public functions of a file that have arguments."""
    try:
        module = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError, OSError):
        return  # files for other versions of Python, and of other encodings
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.args.args and node.name[0] != "_":
            node.decorator_list = []
            yield node


def iterate_functions(path: Path) -> Iterator[str]:
    """Yield a prompt to complete each function of a file that has a docstring."""
    shortest, longest = DOCSTRING_CHARACTERS
    for node in walk_functions(path):
        if shortest <= len(ast.get_docstring(node) or "") <= longest:
            node.body = node.body[:1]
            yield f"Complete this function:\n\n```python\n{ast.unparse(node)}\n```"


def iterate_edits(path: Path) -> Iterator[str]:
    """Yield a prompt to change each function of a file."""
    shortest, longest = EDITED_CHARACTERS
    for number, node in enumerate(walk_functions(path)):
        if shortest <= len(code := ast.unparse(node)) <= longest:
            edit = EDITS[number % len(EDITS)].format(
                name=node.name, other=f"new_{node.name}", argument=node.args.args[-1].arg
            )
            yield f"{edit}\n\n```python\n{code}\n```"


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


def iterate_prose() -> Iterator[str]:
    """Yield requests for text, made from templates."""
    for request, subject, place in product(PROSE, SUBJECTS, PLACES):
        yield request.format(topic=f"{subject} {place}")


def iterate_records(random: Random) -> Iterator[str]:
    """Yield requests for JSON, made from templates."""
    for request, (what, (fields, text)), name, city in product(
        RECORDS, THINGS.items(), NAMES, CITIES
    ):
        words = {"name": name, "city": city, "thing": random.choice(GOODS)}
        text = text.format(**words, n=random.randint(2, 60), m=random.randint(1, 5))
        yield request.format(what=what, fields=fields, text=text)


def iterate_queries() -> Iterator[str]:
    """Yield requests for SQL, made from templates."""
    for request, task, (table, names) in product(QUERIES, QUESTIONS_OF_TABLES, TABLES.items()):
        number, group = names
        yield request.format(task=task.format(number=number, group=group), table=table)


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
    random, chosen = Random(flags.seed), list[str]()
    found = {
        "functions": [prompt for path in sources for prompt in iterate_functions(path)],
        "requests": [*iterate_requests()],
        "questions": [*read_questions(flags.input)] if flags.input else [],
        "edits": [prompt for path in sources for prompt in iterate_edits(path)],
        "prose": [*iterate_prose()],
        "records": [*iterate_records(Random(flags.seed))],
        "queries": [*iterate_queries()],
    }
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
