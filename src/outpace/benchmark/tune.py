"""The fastest options of a method within a loss of accuracy, searched by Optuna."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.benchmark.entry import Entry, swept, word
from outpace.benchmark.side import Side
from outpace.benchmark.summary import Figures, result
from outpace.decoding import CAUSAL_KINDS, Kind
from outpace.evaluation.samples import Samples
from outpace.jsonl import Record
from outpace.methods import Autoregressive, BlockDiffusion, LeftToRight, Method
from outpace.methods.method import Among, Within
from outpace.methods.options import Option, options_of

try:
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
except ImportError as error:
    raise ValueError(f"{error}; tuning needs: pip install 'outpace[tune]'") from error

WORST = -100.0
"""Value of options that do not go together: no setting loses more points."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


def careful(llm: LLM) -> Method:
    """How a model answers one token at a time, against which a loss counts.

    A model of causal attention autoregressively; a diffusion model from left to right, the whole
    canvas in sight; a block diffusion model the surest token of a block at a time.
    """
    if llm.config.kind is Kind.BLOCK:
        return BlockDiffusion(threshold=None)
    return Autoregressive() if llm.config.kind in CAUSAL_KINDS else LeftToRight()


def space_of(kind: type[Method], fixed: Mapping[str, Any]) -> dict[str, Option]:
    """Options that a search varies; `ValueError` where there is none."""
    space = {
        name: option
        for name, option in options_of(kind).items()
        if option.search is not None and name not in fixed
    }
    if not space:
        given = f" beside {', '.join(fixed)}" if fixed else ""
        raise ValueError(f"{kind.__name__} has no option to tune{given}")
    return space


def distribution(option: Option) -> BaseDistribution:
    """An option as Optuna draws it."""
    match option.search:
        case Among(values):
            return CategoricalDistribution(values)
        case Within(low, high, log) if option.kind is int:
            return IntDistribution(int(low), int(high), log=log)
        case Within(low, high, log):
            return FloatDistribution(low, high, log=log)
    raise AssertionError(f"{option.name} is not searched")


def usual(space: Mapping[str, Option]) -> dict[str, Any]:
    """Defaults that lie within the space: what is tried first."""

    def fits(option: Option) -> bool:
        match option.search:
            case Among(values):
                return option.default in values
            case Within(low, high):
                return isinstance(option.default, int | float) and low <= option.default <= high
        return False

    return {name: option.default for name, option in space.items() if fits(option)}


@dataclass(slots=True, kw_only=True)
class Search:
    """Trials of the options of one method.

    Attributes:
        side: what answers; its entry is the method against which a loss counts.
        fixed: options that are not searched.
        max_loss: points of percent of accuracy that may be lost.
        by: key of the speed in a result.
        samples: records of the reference, number 0, and of all trials, from 1 on.
    """

    side: Side
    kind: type[Method]
    name: str
    fixed: Mapping[str, Any]
    max_loss: float
    by: str
    seed: int
    samples: Samples
    space: dict[str, Option] = field(init=False)
    study: optuna.Study = field(init=False)

    def __post_init__(self) -> None:
        """Take up the trials of an earlier run."""
        self.space = space_of(self.kind, self.fixed)
        self.study = optuna.create_study(direction="maximize")
        for record in self.trials:
            self.remember(record)

    @property
    def trials(self) -> list[Record]:
        """Records of the trials so far, in their order."""
        records = self.samples.records
        return [records[number] for number in sorted(n for n in map(int, records) if n)]

    @property
    def reference(self) -> Figures:
        """What the careful method comes to."""
        if 0 not in self.samples.records:
            self.samples.add(0, {"result": measured(self.side)})
        found: Figures = self.samples.records[0]["result"]
        return found

    def run(self, trials: int, progress: Callable[[Record], None]) -> None:
        """Try options until there are so many trials, those of earlier runs included."""
        least = self.reference["accuracy"] - self.max_loss / 100
        for number in range(len(self.trials) + 1, trials + 1):
            parameters = self.suggest(number)
            record = {"parameters": parameters, **self.measure(parameters, least)}
            self.samples.add(number, record)
            self.remember(record)
            progress(record)

    def suggest(self, number: int) -> dict[str, Any]:
        """Parameters of a trial: they follow from seed, number and the values of those before."""
        # A sampler of its own for each, so that a run that was killed goes on alike.
        self.study.sampler = optuna.samplers.TPESampler(seed=self.seed * 1_000_003 + number)
        if number == 1:
            self.study.enqueue_trial(usual(self.space))
        asked = self.study.ask({name: distribution(o) for name, o in self.space.items()})
        self.study.tell(asked, state=optuna.trial.TrialState.FAIL)  # the record says what became
        return {name: asked.params[name] for name in self.space}

    def measure(self, parameters: Mapping[str, Any], least: float) -> Record:
        """Value and result of some parameters; a value below zero is what they lose too much."""
        try:
            found = measured(self.side_of(self.entry(parameters)))
        except ValueError as error:
            return {"value": WORST, "error": str(error)}
        short = least - found["accuracy"]
        return {"value": found[self.by] if short <= 1e-9 else -100 * short, "result": found}

    def entry(self, parameters: Mapping[str, Any]) -> Entry:
        """The method with some parameters, of which three digits count."""
        chosen = {
            name: float(f"{value:.3g}") if isinstance(value, float) else value
            for name, value in parameters.items()
        }
        values = {name: [value] for name, value in {**self.fixed, **chosen}.items()}
        (entry,) = swept(self.side.entry.model, self.name, values)
        setting = " ".join(f"{name}={word(value)}" for name, value in chosen.items())
        return replace(entry, line=entry.line.removesuffix(f" {setting}"), setting=setting)

    def side_of(self, entry: Entry) -> Side:
        """A side on the same questions."""
        options: Options = {**self.side.options, "method": entry.method}
        return replace(self.side, entry=entry, options=options, turns=[])

    def remember(self, record: Record) -> None:
        """Let the sampler know what became of a trial."""
        drawn = {name: distribution(option) for name, option in self.space.items()}
        self.study.add_trial(
            optuna.trial.create_trial(
                params=record["parameters"], distributions=drawn, value=record["value"]
            )
        )

    def best(self, count: int) -> list[Record]:
        """The fastest trials that keep the accuracy, each setting once."""
        kept = sorted((r for r in self.trials if r["value"] > 0), key=lambda r: r["value"])
        return list({record["result"]["setting"]: record for record in kept}.values())[
            : -count - 1 : -1
        ]

    @property
    def unit(self) -> str:
        """What is to be large, in words."""
        return self.by.replace("_", " ")


def measured(side: Side) -> Figures:
    """A result of all questions in one turn, after a batch that does not count."""
    side.answer(side.questions[: side.load.batch])
    side.take(side.questions)
    return result(side, 1)


def results_of(records: Sequence[Record]) -> list[Figures]:
    """Results of the trials that could run."""
    return [record["result"] for record in records if "result" in record]
