"""Figures of papers as data: measured entries, published points, and claims."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.options import format_value
from outpace.errors import OptionError
from outpace.field_types import read_section
from outpace.lab.protocol import Setting, find_setting, load_settings
from outpace.lab.tasks import TASKS

if TYPE_CHECKING:
    from outpace.lab.entry import MethodEntry
    from outpace.methods import Method


FOLDER = Path(__file__).parent / "papers"
PAPERS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
SCALES = ("mini", "small", "full")
GIVEN = "given:"
"""Prefix of a model whose path the user gives."""

Published = Mapping[str, Any]
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A property of the published figure that the measured one must share."""

    text: str
    line: int
    """Number of the line, counted from 1."""
    trend: str
    """`rises` or `falls` from its first setting to its last; `higher` or `lower` than another line
    at each setting; `kept` if no less than there; `unbeaten` by another line, in accuracy (with a
    judge, likelihood) and speed."""
    key: str = "tokens_per_forward"
    """The figure of a result that is compared; `speed` is tokens per second, `gain` the speed
    relative to the first line, or to those of `over`, `likelihood` that of the text by the scale's
    judge, `latency` the seconds of an answer."""
    factor: float = 1.0
    """How many times as fast the line must be."""
    than: int | None = None
    """Number of the other line."""
    over: Sequence[int] = ()
    """Numbers of the lines over which the gains of this and the other line are."""
    points: Sequence[Published] = ()
    """The fields that identify the published points, first to last or other to this line; empty
    where the paper gives no numbers."""
    at: str = ""
    """The only setting that is compared with another line; all if empty."""
    scales: Sequence[str] = SCALES
    """The scales that have its lines."""
    note: Mapping[str, str] = field(default_factory=dict)
    """By scale, the reason that the paper does not have, if the stored claim holds for one."""
    why: Mapping[str, str] = field(default_factory=dict)
    """By scale, the reason why the stored claim does not hold."""

    @property
    def lines(self) -> list[int]:
        """The numbers of all lines that are compared, its own first."""
        return [self.line, *([self.than] if self.than else []), *self.over]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of a task is measured, on which models."""

    task: str
    lines: Sequence[Mapping[str, Any]]
    """Entries as a file has them: model, adapter, method, options, lists where they are swept, as
    `together` the values of options that are swept together, as `task` another one without a file,
    as `protocol` one of other lengths and sampling, and as `paper` the fields that identify the
    published point beside them."""
    protocol: str = "plain"
    limit: int = 100
    rounds: int = 10
    batch: Sequence[int] = (1,)
    """Numbers of concurrent requests; each line is measured at all of them."""
    max_tokens: int | None = None
    temperature: float | None = None
    is_lossless: bool = False
    """Whether all lines must give the texts of the first one."""
    judge: str | None = None
    """Causal model that measures the likelihood of the answers."""
    minutes: float | None = None
    """Measured minutes of CPU time, for the expected time."""

    def setting(self) -> Setting:
        return find_setting(self.task, self.protocol)

    @cached_property
    def entries(self) -> list[list[MethodEntry]]:
        """The entries of each line; none of an empty one."""
        return [
            sweep_batches(list(line_of(line)), self.batch) if line else [] for line in self.lines
        ]

    @property
    def every(self) -> list[MethodEntry]:
        return [entry for line in self.entries for entry in line]

    @property
    def given(self) -> dict[str, None]:
        """The models whose paths the user gives, without their prefix."""
        names = [name for entry in self.every for name in entry.model_names]
        names += [self.judge] if self.judge else []
        return dict.fromkeys(n.removeprefix(GIVEN) for n in names if n.startswith(GIVEN))

    def with_models(self, paths: Mapping[str, str]) -> Scale:
        """Replace given models by their paths, and empty the lines of those without a path."""
        if missing := [
            each for each in replace(self, lines=self.lines[:1]).given if each not in paths
        ]:
            raise OptionError(
                "model", missing, f"give {', '.join(missing)}, as in --model {missing[0]}=PATH"
            )
        named = {f"{GIVEN}{name}": path for name, path in paths.items()}
        lines = [
            {key: named.get(str(value), value) for key, value in line.items()}
            for line in self.lines
        ]
        able = [
            {} if any(str(value).startswith(GIVEN) for value in line.values()) else line
            for line in lines
        ]
        plan = replace(self, lines=able, judge=named.get(str(self.judge), self.judge))
        if plan.judge in [getattr(entry.method, "verifier", "") for entry in plan.every]:
            raise OptionError(
                "model",
                plan.judge,
                "the judge is also a verifier of this figure; give another model",
            )
        return plan


def line_of(line: Mapping[str, Any]) -> Iterator[MethodEntry]:
    from outpace.lab.entry import expand_entries
    from outpace.methods.options import find_method

    options = dict(line)
    model, method = options.pop("model"), find_method(options.pop("method"))
    adapter, task, protocol = (options.pop(key, None) for key in ("adapter", "task", "protocol"))
    together = options.pop("together", [])
    options.pop("paper", None)
    values = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
    entries = [
        replace(
            entry,
            line=" ".join(filter(None, (entry.line, task, protocol))),
            task=task,
            protocol=protocol,
        )
        for entry in expand_entries(model, method, values, adapter)
    ]
    if not together:
        yield from entries
    for entry in entries if together else ():
        yield from sweep_together(entry, method, options, together)


def sweep_batches(line: Sequence[MethodEntry], batches: Sequence[int]) -> list[MethodEntry]:
    if len(batches) == 1:
        return [replace(entry, batch=batches[0]) for entry in line]
    if len(line) > 1:
        raise ValueError(f"batch: {line[0].line} sweeps an option, so its scale has one batch")
    return [replace(line[0], batch=batch, setting=f"batch={batch}") for batch in batches]


def sweep_together(
    entry: MethodEntry, method: type[Method], options: Options, changes: Sequence[Options]
) -> Iterator[MethodEntry]:
    from outpace.methods.options import method_from_options

    for change in changes:
        setting = " ".join(f"{name}={format_value(value)}" for name, value in change.items())
        changed = method_from_options(method, {**options, **change})
        yield replace(entry, method=changed, setting=setting)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figure:
    """A figure of a paper."""

    paper: str
    name: str
    about: str
    place: str
    """Beginning of the places of its published points."""
    task: str
    """Of the published points, where the paper has none of the task that is measured."""
    claims: Sequence[Claim]
    """Properties that the measured figure must share."""
    scales: Mapping[str, Sequence[Scale]]
    """What is measured, task by task: `mini` on the models of the zoo, `full` on the published
    ones, `small` on a published one that a processor decodes fast."""

    def published(self, task: str | None = None) -> list[Published]:
        """The points of the paper, with the names of their settings."""
        points: dict[str, list[Published]] = {}
        for each in load_settings(self.paper):
            points.setdefault(each.task, []).extend(
                {"setting": each.name, **point}
                for point in each.published
                if str(point["place"]).startswith(self.place)
            )
        measured = self.task if task is None else TASKS[task].stands_for or task
        return points.get(measured) or points[self.task]

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
    where = f"{paper}:{name}"
    return Figure(
        **rest,
        paper=paper,
        name=name,
        claims=[read_section(f"{where} claims", Claim, claim) for claim in table["claims"]],
        scales={
            scale: [
                read_section(f"{where} {scale}", Scale, {**plan, "task": task})
                for task in (plan["task"] if isinstance(plan["task"], list) else [plan["task"]])
            ]
            for scale, plan in table.items()
            if scale in SCALES
        },
    )


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


def figures_at(scale: str) -> list[Figure]:
    """Return all figures with a scale; `OptionError` for an unknown scale."""
    if scale not in SCALES:
        raise OptionError("scale", scale, f"unknown scale {scale!r}; known are {', '.join(SCALES)}")
    every = (figure for paper in PAPERS for figure in figures(paper))
    return [figure for figure in every if scale in figure.scales]


def find_at(named: str, scale: str) -> list[Figure]:
    """Return figures of `find` with a scale; `OptionError` naming all that have it if none do."""
    every = figures_at(scale)
    found = [figure for figure in find(named) if scale in figure.scales]
    if not found:
        known = ", ".join(f"{each.paper}:{each.name}" for each in every)
        raise OptionError(
            "scale", scale, f"{named} has no scale {scale}; figures with it are {known}"
        )
    return found


def given_models(plans: Iterable[Scale]) -> list[str]:
    """Return the models of plans whose paths the user gives."""
    return list(dict.fromkeys(name for plan in plans for name in plan.given))


def model_paths(texts: Iterable[str], plans: Sequence[Scale]) -> dict[str, str]:
    """Return paths by name, from NAME=PATH; `OptionError` for a model that no plan needs."""
    known = given_models(plans)
    paths: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not known:
            raise OptionError(
                "model", text, f"{text}: this scale names its models; omit it, or use --scale small"
            )
        if name not in known or name in paths or not path:
            raise OptionError(
                "model", text, f"{text}: give each of {', '.join(known)} once, as NAME=PATH"
            )
        paths[name] = path
    return paths


def task_files(texts: Iterable[str], plans: Sequence[Scale], option: str) -> dict[str, str]:
    """Return the files of an option by task, from TASK=FILE or a file alone."""
    tasks = list(dict.fromkeys(plan.task for plan in plans))
    files: dict[str, str] = {}
    for text in texts:
        task, _, path = text.partition("=")
        if task not in TASKS:
            if len(tasks) != 1:
                raise OptionError(
                    option, text, f"{text}: write TASK=FILE, for each of {', '.join(tasks)}"
                )
            task, path = tasks[0], text
        if task not in tasks or not path:
            names = ", ".join(tasks) or "none"
            raise OptionError(option, text, f"{text}: write TASK=FILE; tasks here are {names}")
        files[task] = path
    return files


def shot_files(texts: Iterable[str], plans: Sequence[Scale]) -> dict[str, str]:
    """Return the files of shots by task, of those that have shots."""
    return task_files(texts, [plan for plan in plans if plan.setting().shots], "shots")


TRAINED = "trained:"
"""Prefix of the name of such a model."""

TRAINED_NAME = re.compile(rf"{TRAINED}[\w.-]+")
"""Such a name within the arguments of `outpace train` for another model."""

TABLE = Path(__file__).parent / "trained.toml"


def words_of(name: str) -> str:
    """Return the arguments of `outpace train` for a model."""
    words: str = tomllib.loads(TABLE.read_text("utf-8"))[name.removeprefix(TRAINED)]
    return words


def needed(entries: Iterable[MethodEntry]) -> dict[str, str]:
    """Return the models that must be trained for entries, with the arguments of each.

    A model that another one starts from comes before it.
    """
    names = dict.fromkeys(name for entry in entries for name in entry.model_names)
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(TRAINED):
            words = words_of(name)
            found |= {base: words_of(base) for base in TRAINED_NAME.findall(words)} | {name: words}
    return found
