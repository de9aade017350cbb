"""Figures of papers as data: what is measured for them, what was published, what must show."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from outpace.benchmark.entry import MethodEntry, expand_entries
from outpace.evaluation.protocol import Setting, find_setting, load_settings
from outpace.evaluation.tasks import TASKS

FOLDER = Path(__file__).parent / "papers"
PAPERS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
SCALES = ("mini", "full")
TRENDS = ("rises", "falls", "higher", "lower", "unbeaten")
Published = Mapping[str, Any]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a figure must show to look like the published one.

    Attributes:
        says: the same in words.
        line: number of the line that is looked at, from 1 on.
        trend: `rises` or `falls` from its first setting to its last; `higher` or `lower` than
            another line at each setting; `unbeaten` by another line, in accuracy and speed.
        key: the figure of a result that is compared; `speed` is tokens per second.
        than: number of the other line.
        points: the published points that say so, first to last or other to this line, each by
            what tells it apart; none where the paper gives no numbers.
    """

    says: str
    line: int
    trend: str
    key: str = "tokens_per_forward"
    than: int | None = None
    points: Sequence[Published] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` for a trend that is none."""
        if self.trend not in TRENDS:
            raise ValueError(f"unknown trend {self.trend!r}; known are {', '.join(TRENDS)}")
        if (self.than is None) != (self.trend in TRENDS[:2]):
            raise ValueError(f"{self.says!r} needs {'no' if self.than else 'another'} line: than")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured, on which models.

    Attributes:
        lines: entries as a file has them: model, adapter, method, options, lists where they are
            swept.
    """

    task: str
    lines: Sequence[Mapping[str, Any]]
    protocol: str = "plain"
    limit: int = 100
    rounds: int = 10
    batch: int = 1
    max_tokens: int | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a task or a line that is none."""
        if self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}; known are {', '.join(TASKS)}")
        self.entries()

    def setting(self) -> Setting:
        """How the task is asked."""
        return find_setting(self.task, self.protocol)

    def entries(self) -> list[list[MethodEntry]]:
        """The entries of each line."""
        return [list(line_of(line)) for line in self.lines]

    @property
    def every(self) -> list[MethodEntry]:
        """The entries of all lines."""
        return [entry for line in self.entries() for entry in line]


def line_of(line: Mapping[str, Any]) -> Iterator[MethodEntry]:
    """The entries of a line; `ValueError` for one without model or method."""
    options = dict(line)
    for name in ("model", "method"):
        if not isinstance(options.get(name), str):
            raise ValueError(f"a line needs a {name}: {line}")
    model, method = options.pop("model"), options.pop("method")
    adapter = options.pop("adapter", None)
    values = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
    yield from expand_entries(model, method, values, adapter)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figure:
    """A figure of a paper.

    Attributes:
        about: what it shows.
        place: how the places of its published points begin.
        task: of the published points.
        claims: what must show.
        mini: on the models of the zoo.
        full: on the published ones.
    """

    paper: str
    name: str
    about: str
    place: str
    task: str
    claims: Sequence[Claim]
    mini: Scale
    full: Scale

    def published(self) -> list[Published]:
        """The points of the paper, with the names of their settings."""
        return [
            {"setting": each.name, **point}
            for each in load_settings(self.paper)
            if each.task == self.task
            for point in each.published
            if str(point["place"]).startswith(self.place)
        ]

    def file(self, scale: str) -> str:
        """What files of it are called, without their ending."""
        return f"{self.paper}-{self.name}-{scale}"

    def pair(self, claim: Claim) -> list[Published]:
        """The published points of a claim; `ValueError` for one that is none or several."""
        found = []
        for marks in claim.points:
            fit = [point for point in self.published() if marks.items() <= point.items()]
            if len(fit) != 1:
                raise ValueError(f"{claim.says!r}: {len(fit)} published points are {dict(marks)}")
            found += fit
        return found

    def hours(self, limit: int) -> float:
        """What answers of full length take at the published speeds; 0 where none are."""
        tokens = limit * (self.full.max_tokens or self.full.setting().max_tokens)
        speeds = [point.get("tokens_per_second") for point in self.published()]
        return sum(tokens / speed for speed in speeds if speed) / 3600


def figure_names() -> list[str]:
    """`paper:figure` of all that are known."""
    tables = {
        paper: tomllib.loads((FOLDER / f"{paper}.toml").read_text("utf-8")) for paper in PAPERS
    }
    return [f"{paper}:{name}" for paper, table in tables.items() for name in table]


def figures(paper: str) -> list[Figure]:
    """All figures of a paper; `ValueError` for an unknown one."""
    if paper not in PAPERS:
        raise ValueError(f"unknown paper {paper!r}; known are {', '.join(PAPERS)}")
    path = FOLDER / f"{paper}.toml"
    return [
        read(paper, name, table, path)
        for name, table in tomllib.loads(path.read_text("utf-8")).items()
    ]


def read(paper: str, name: str, table: Mapping[str, Any], path: Path) -> Figure:
    """A figure from its table; `ValueError` with file and figure for a bad one."""
    try:
        parts = {
            "claims": [made(Claim, claim) for claim in table["claims"]],
            "mini": made(Scale, table["mini"]),
            "full": made(Scale, table["full"]),
        }
        return made(Figure, {**table, "paper": paper, "name": name, **parts})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name}: {error}") from error


def made(kind: type[Made], table: Mapping[str, Any]) -> Made:
    """A dataclass from a table; `ValueError` for a field that it does not have."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(table) - known):
        raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return kind(**table)


def find(named: str) -> list[Figure]:
    """Figures of `paper` or `paper:figure`; `ValueError` with what is known for another."""
    paper, _, name = named.partition(":")
    every = figures(paper)
    if not name:
        return every
    found = [figure for figure in every if figure.name == name]
    if not found:
        known = ", ".join(f"{paper}:{figure.name}" for figure in every)
        raise ValueError(f"unknown figure {named!r}; known are {known}")
    return found
