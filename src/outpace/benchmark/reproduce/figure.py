"""Figures of papers as data: measured entries, published points, and claims."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.benchmark.entry import MethodEntry, expand_entries
from outpace.errors import OptionError
from outpace.evaluation.protocol import Setting, find_setting, load_settings
from outpace.evaluation.tasks import TASKS

DATA_FOLDER = Path(__file__).parent
FOLDER = DATA_FOLDER / "papers"
PAPERS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
SCALES = ("mini", "small", "full")
TRENDS = ("rises", "falls", "higher", "lower", "unbeaten")
GIVEN = "given:"
"""Prefix of a model whose path the user gives."""

Published = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A property of the published figure that the measured one must share.

    Attributes:
        text: the claim in words.
        line: number of the line, counted from 1.
        trend: `rises` or `falls` from its first setting to its last; `higher` or `lower` than
            another line at each setting; `unbeaten` by another line, in accuracy and speed.
        key: the figure of a result that is compared; `speed` is tokens per second.
        than: number of the other line.
        points: the fields that identify the published points, first to last or other to this
            line; empty where the paper gives no numbers.
        scales: the scales that have its lines.
    """

    text: str
    line: int
    trend: str
    key: str = "tokens_per_forward"
    than: int | None = None
    points: Sequence[Published] = ()
    scales: Sequence[str] = SCALES


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of a task is measured, on which models.

    Attributes:
        lines: entries as a file has them: model, adapter, method, options, lists where they are
            swept, and as `paper` the fields that identify the published point beside them.
        data: files of tasks next to this one, used unless the user gives another.
        is_lossless: whether all lines must give the texts of the first one.
        tokens_per_second: mean speed of the lines on two cores, for the expected time.
    """

    task: str
    lines: Sequence[Mapping[str, Any]]
    protocol: str = "plain"
    limit: int = 100
    rounds: int = 10
    batch: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    is_lossless: bool = False
    tokens_per_second: float | None = None

    def setting(self) -> Setting:
        return find_setting(self.task, self.protocol)

    def entries(self) -> list[list[MethodEntry]]:
        return [list(line_of(line)) for line in self.lines]

    @property
    def every(self) -> list[MethodEntry]:
        return [entry for line in self.entries() for entry in line]

    @property
    def longest(self) -> int:
        return self.max_tokens or self.setting().max_tokens

    @property
    def seconds(self) -> float:
        """Seconds that answers of full length take on two cores; 0 without a mean speed."""
        tokens = len(self.every) * self.limit * self.longest
        return tokens / self.tokens_per_second if self.tokens_per_second else 0.0

    @property
    def given(self) -> dict[str, None]:
        """The models whose paths the user must give, without their prefix."""
        names = [name for entry in self.every for name in entry.model_names]
        return dict.fromkeys(n.removeprefix(GIVEN) for n in names if n.startswith(GIVEN))

    def with_models(self, paths: Mapping[str, str]) -> Scale:
        """Replace given models by their paths; `OptionError` for a missing one."""
        if missing := [name for name in self.given if name not in paths]:
            message = f"--model: give the path of {', '.join(missing)}: --model {missing[0]}=PATH"
            raise OptionError("model", missing, message)
        named = {f"{GIVEN}{name}": path for name, path in paths.items()}
        lines = [
            {key: named.get(str(value), value) for key, value in line.items()}
            for line in self.lines
        ]
        return replace(self, lines=lines)


def line_of(line: Mapping[str, Any]) -> Iterator[MethodEntry]:
    """Yield the entries of a line."""
    options = dict(line)
    model, method = options.pop("model"), options.pop("method")
    adapter = options.pop("adapter", None)
    options.pop("paper", None)
    values = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
    yield from expand_entries(model, method, values, adapter)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figure:
    """A figure of a paper.

    Attributes:
        about: its subject.
        place: beginning of the places of its published points.
        task: of the published points, where the paper has none of the task that is measured.
        claims: properties that the measured figure must share.
        scales: what is measured, task by task: `mini` on the models of the zoo, `full` on the
            published ones, `small` on a published one that a processor decodes fast.
    """

    paper: str
    name: str
    about: str
    place: str
    task: str
    claims: Sequence[Claim]
    scales: Mapping[str, Sequence[Scale]]

    def published(self, task: str | None = None) -> list[Published]:
        """The points of the paper, with the names of their settings."""
        points: dict[str, list[Published]] = {}
        for each in load_settings(self.paper):
            points.setdefault(each.task, []).extend(
                {"setting": each.name, **point}
                for point in each.published
                if str(point["place"]).startswith(self.place)
            )
        return points.get(task or self.task) or points[self.task]

    def file(self, scale: str, plan: Scale) -> str:
        name = f"{self.paper}-{self.name}-{scale}"
        return f"{name}-{plan.task}" if len(self.scales[scale]) > 1 else name

    def claims_at(self, scale: str) -> list[Claim]:
        return [claim for claim in self.claims if scale in claim.scales]

    def point(self, marks: Published, task: str | None = None) -> Published:
        """Return the published point with these fields; `ValueError` for none or several."""
        fit = [point for point in self.published(task) if marks.items() <= point.items()]
        if len(fit) != 1:
            raise ValueError(f"{len(fit)} published points are {dict(marks)}")
        return fit[0]

    def pair(self, claim: Claim, task: str | None = None) -> list[Published]:
        """Return the published points of a claim; `ValueError` for an ambiguous or missing one."""
        return [self.point(marks, task) for marks in claim.points]

    def published_seconds(self, plan: Scale) -> float:
        """Return the seconds of answers of full length at the published speeds, 0 without any."""
        tokens = plan.limit * plan.longest
        speeds = [point.get("tokens_per_second") for point in self.published()]
        return sum(tokens / speed for speed in speeds if speed)


def figure_names() -> list[str]:
    tables = {
        paper: tomllib.loads((FOLDER / f"{paper}.toml").read_text("utf-8")) for paper in PAPERS
    }
    return [f"{paper}:{name}" for paper, table in tables.items() for name in table]


def figures(paper: str) -> list[Figure]:
    """Return all figures of a paper; `ValueError` for an unknown one."""
    if paper not in PAPERS:
        raise ValueError(f"unknown paper {paper!r}; known are {', '.join(PAPERS)}")
    tables = tomllib.loads((FOLDER / f"{paper}.toml").read_text("utf-8"))
    return [read(paper, name, table) for name, table in tables.items()]


def read(paper: str, name: str, table: Mapping[str, Any]) -> Figure:
    """Build a figure from its table."""
    rest = {key: value for key, value in table.items() if key not in (*SCALES, "claims")}
    return Figure(
        **rest,
        paper=paper,
        name=name,
        claims=[Claim(**claim) for claim in table["claims"]],
        scales={scale: split_tasks(table[scale]) for scale in SCALES if scale in table},
    )


def split_tasks(table: Mapping[str, Any]) -> list[Scale]:
    tasks = table["task"] if isinstance(table["task"], list) else [table["task"]]
    return [Scale(**{**table, "task": task}) for task in tasks]


def find(named: str) -> list[Figure]:
    """Return figures of `paper` or `paper:figure`; `ValueError` with all names for another."""
    paper, _, name = named.partition(":")
    every = figures(paper)
    if not name:
        return every
    found = [figure for figure in every if figure.name == name]
    if not found:
        known = ", ".join(f"{paper}:{figure.name}" for figure in every)
        raise ValueError(f"unknown figure {named!r}; known are {known}")
    return found


def find_at(named: str, scale: str) -> list[Figure]:
    """Return figures of `find` with a scale; `OptionError` naming all that have it if none do."""
    if scale not in SCALES:
        message = f"scale: unknown scale {scale!r}; known are {', '.join(SCALES)}"
        raise OptionError("scale", scale, message)
    found = [figure for figure in find(named) if scale in figure.scales]
    if not found:
        every = (figure for paper in PAPERS for figure in figures(paper))
        known = ", ".join(f"{each.paper}:{each.name}" for each in every if scale in each.scales)
        message = f"scale: {named} has no scale {scale}; figures with it are {known}"
        raise OptionError("scale", scale, message)
    return found


def model_paths(texts: Iterable[str], plans: Sequence[Scale]) -> dict[str, str]:
    """Return paths by name, from NAME=PATH; `OptionError` for a model that no plan needs."""
    known = list(dict.fromkeys(name for plan in plans for name in plan.given))
    paths: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not known:
            message = f"--model {text}: this scale names its models; omit it, or use --scale small"
            raise OptionError("model", text, message)
        if name not in known or name in paths or not path:
            message = f"--model {text}: give each of {', '.join(known)} once, as NAME=PATH"
            raise OptionError("model", text, message)
        paths[name] = path
    return paths


def task_files(texts: Iterable[str], plans: Sequence[Scale]) -> dict[str, str]:
    """Return files by task, from TASK=FILE or a file alone; `OptionError` for other tasks."""
    tasks = list(dict.fromkeys(plan.task for plan in plans))
    files = {task: str(DATA_FOLDER / name) for plan in plans for task, name in plan.data.items()}
    for text in texts:
        task, _, path = text.partition("=")
        if task not in TASKS:
            if len(tasks) > 1:
                message = f"--data {text}: write TASK=FILE, for each of {', '.join(tasks)}"
                raise OptionError("data", text, message)
            task, path = tasks[0], text
        if task not in tasks or not path:
            message = f"--data {text}: write TASK=FILE; tasks here are {', '.join(tasks)}"
            raise OptionError("data", text, message)
        files[task] = path
    return files


TRAINED = "trained:"
"""Prefix of the name of such a model."""

TABLE = Path(__file__).parent / "trained.toml"


def words_of(name: str) -> str:
    """Return the arguments of `outpace train` for a model."""
    words: str = tomllib.loads(TABLE.read_text("utf-8"))[name.removeprefix(TRAINED)]
    return words


def needed(entries: Iterable[MethodEntry]) -> dict[str, str]:
    """Return the models that must be trained for entries, with the arguments of each."""
    names = dict.fromkeys(name for entry in entries for name in entry.model_names)
    return {name: words_of(name) for name in names if name.startswith(TRAINED)}
