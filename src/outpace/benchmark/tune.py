"""Search with Optuna for the fastest options of a method within an allowed accuracy loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.benchmark.entry import MethodEntry, expand_entries, format_value
from outpace.benchmark.side import Side, SideFigures, scored_figures
from outpace.decoding import CAUSAL_KINDS, Kind
from outpace.evaluation.samples import Samples
from outpace.jsonl import JsonRecord
from outpace.methods import Autoregressive, BlockDiffusion, LeftToRight, Method
from outpace.methods.method import Interval, OneOf
from outpace.methods.options import Option, method_options

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

INVALID_VALUE = -100.0
"""Value of invalid combinations of options, below that of any valid one."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


def reference_method(llm: LLM) -> Method:
    """Return the one-token-at-a-time method against which accuracy loss is measured.

    Causal models decode autoregressively, diffusion models from left to right with the full
    canvas visible, block diffusion models the most confident token of a block at a time.
    """
    if llm.config.kind is Kind.BLOCK:
        return BlockDiffusion(threshold=None)
    return Autoregressive() if llm.config.kind in CAUSAL_KINDS else LeftToRight()


def search_space(kind: type[Method], fixed: Mapping[str, Any]) -> dict[str, Option]:
    """Return the options that a search varies; `ValueError` if there are none."""
    space = {
        name: option
        for name, option in method_options(kind).items()
        if option.search is not None and name not in fixed
    }
    if not space:
        besides = f" besides {', '.join(fixed)}" if fixed else ""
        raise ValueError(f"method {kind.__name__} has no option to tune{besides}")
    return space


def option_distribution(option: Option) -> BaseDistribution:
    match option.search:
        case OneOf(values):
            return CategoricalDistribution(values)
        case Interval(low, high, log) if option.kind is int:
            return IntDistribution(int(low), int(high), log=log)
        case Interval(low, high, log):
            return FloatDistribution(low, high, log=log)
    raise AssertionError(f"{option.name} is not searched")


def default_parameters(space: Mapping[str, Option]) -> dict[str, Any]:

    def is_in_space(option: Option) -> bool:
        match option.search:
            case OneOf(values):
                return option.default in values
            case Interval(low, high):
                return isinstance(option.default, int | float) and low <= option.default <= high
        return False

    return {name: option.default for name, option in space.items() if is_in_space(option)}


@dataclass(slots=True, kw_only=True)
class TuningSearch:
    """Trials of the options of one method.

    Attributes:
        side: side with the reference method as its entry.
        kind: class of the tuned method.
        name: name of the tuned method.
        fixed: options that are not searched.
        max_loss: allowed loss of accuracy in percentage points.
        by: key of the speed to maximise in a result.
        seed: seed of the sampler.
        samples: records of the reference, number 0, and of trials, from 1 on.
        space: options to search.
        study: the Optuna study with all trials so far.
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
        """Add the trials of an earlier run to the study."""
        self.space = search_space(self.kind, self.fixed)
        self.study = optuna.create_study(direction="maximize")
        for record in self.trials:
            self.record_trial(record)

    @property
    def trials(self) -> list[JsonRecord]:
        records = self.samples.records
        return [records[number] for number in sorted(n for n in map(int, records) if n)]

    @property
    def reference_result(self) -> SideFigures:
        """Result of the reference method, measured on first use."""
        if 0 not in self.samples.records:
            self.samples.add_record(0, {"result": measure_side(self.side)})
        figures: SideFigures = self.samples.records[0]["result"]
        return figures

    def run_trials(self, trials: int, progress: Callable[[JsonRecord], None]) -> None:
        """Run trials until there are `trials`, including those of earlier runs."""
        least = self.reference_result["accuracy"] - self.max_loss / 100
        for number in range(len(self.trials) + 1, trials + 1):
            parameters = self.suggest_parameters(number)
            record = {"parameters": parameters, **self.measure_parameters(parameters, least)}
            self.samples.add_record(number, record)
            self.record_trial(record)
            progress(record)

    def suggest_parameters(self, number: int) -> dict[str, Any]:
        """Return the parameters of a trial, a function of seed, number and earlier values."""
        # A new sampler per trial, so that an interrupted run continues identically.
        self.study.sampler = optuna.samplers.TPESampler(seed=self.seed * 1_000_003 + number)
        if number == 1:
            self.study.enqueue_trial(default_parameters(self.space))
        trial = self.study.ask({name: option_distribution(o) for name, o in self.space.items()})
        # The completed trial is added later, from its record.
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return {name: trial.params[name] for name in self.space}

    def measure_parameters(self, parameters: Mapping[str, Any], least: float) -> JsonRecord:
        """Measure parameters; a negative value is the loss in excess of the allowed one."""
        try:
            figures = measure_side(self.build_side(self.build_entry(parameters)))
        except ValueError as error:
            return {"value": INVALID_VALUE, "error": str(error)}
        short = least - figures["accuracy"]
        return {"value": figures[self.by] if short <= 1e-9 else -100 * short, "result": figures}

    def build_entry(self, parameters: Mapping[str, Any]) -> MethodEntry:
        """Return an entry with these parameters, rounded to three significant digits."""
        chosen = {
            name: float(f"{value:.3g}") if isinstance(value, float) else value
            for name, value in parameters.items()
        }
        values = {name: [value] for name, value in {**self.fixed, **chosen}.items()}
        (entry,) = expand_entries(self.side.entry.model, self.name, values)
        setting = " ".join(f"{name}={format_value(value)}" for name, value in chosen.items())
        return replace(entry, line=entry.line.removesuffix(f" {setting}"), setting=setting)

    def build_side(self, entry: MethodEntry) -> Side:
        options: Options = {**self.side.options, "method": entry.method}
        return replace(self.side, entry=entry, options=options, turns=[])

    def record_trial(self, record: JsonRecord) -> None:
        distributions = {name: option_distribution(option) for name, option in self.space.items()}
        self.study.add_trial(
            optuna.trial.create_trial(
                params=record["parameters"], distributions=distributions, value=record["value"]
            )
        )

    def best_trials(self, count: int) -> list[JsonRecord]:
        """Return the fastest trials within the allowed loss, each setting once."""
        valid = sorted((r for r in self.trials if r["value"] > 0), key=lambda r: r["value"])
        return list({record["result"]["setting"]: record for record in valid}.values())[
            : -count - 1 : -1
        ]

    @property
    def unit(self) -> str:
        return self.by.replace("_", " ")


def measure_side(side: Side) -> SideFigures:
    side.answer_questions(side.questions[: side.load.batch])
    side.run_turn(side.questions)
    return scored_figures(side, 1)


def trial_results(records: Sequence[JsonRecord]) -> list[SideFigures]:
    """Return the results of trials without an error."""
    return [record["result"] for record in records if "result" in record]
