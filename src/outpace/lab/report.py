"""Report of a run: accuracy and speed, with their statistical errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from outpace.api.output import DRAFT_COUNTS, Output
from outpace.checkpoints.name import short_title
from outpace.lab import metrics
from outpace.lab.samples import SCHEMA_VERSION


@dataclass(slots=True, kw_only=True)
class EvaluationReport:
    """Metrics of one run. Only output tokens count, never prompts or the warm-up."""

    task: str
    model: str
    method: str
    batch: int
    protocol: str = ""
    questions: str = ""
    """Hash of the questions."""
    outputs: list[Output] = field(default_factory=list, repr=False)
    verdicts: list[bool | None] = field(default_factory=list, repr=False)
    """Whether each answer is correct; None if it is not judged."""
    seconds: float = 0.0
    """Wall time of the answers."""

    def add_answer(self, output: Output, right: bool | None) -> None:
        self.outputs.append(output)
        self.verdicts.append(right)

    @property
    def correct_count(self) -> int:
        return sum(right is True for right in self.verdicts)

    @property
    def judged_count(self) -> int:
        return sum(right is not None for right in self.verdicts)

    @property
    def accuracy(self) -> float:
        return self.correct_count / max(self.judged_count, 1)

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(self.judged_count, 1))

    @property
    def accuracy_interval(self) -> tuple[float, float]:
        return metrics.wilson_interval(self.correct_count, self.judged_count)

    @property
    def token_count(self) -> int:
        return sum(len(output.ids) for output in self.outputs)

    @property
    def tokens_per_forward(self) -> float:
        return self.token_count / max(sum(output.forwards for output in self.outputs), 1)

    @property
    def tokens_per_second(self) -> float:
        return self.token_count / self.seconds if self.seconds else 0.0

    @property
    def truncated_lengths(self) -> list[int]:
        return [len(each.ids) for each in self.outputs if each.finish_reason == "length"]

    def to_record(self) -> dict[str, Any]:
        """Return the metrics as JSON fields; `samples` has per-answer columns."""
        return {
            "schema": SCHEMA_VERSION,
            "task": self.task,
            "protocol": self.protocol,
            "questions": self.questions,
            "model": short_title(self.model),
            "method": self.method,
            "batch": self.batch,
            "problems": len(self.outputs),
            **self.accuracy_fields(),
            **self.speed_fields(),
            **self.acceptance_fields(),
            "unfinished": len(self.truncated_lengths),
            "cut_at": max(self.truncated_lengths, default=None),
            "seconds": round(self.seconds, 2),
            "samples": {
                "right": self.verdicts,
                "tokens": [len(output.ids) for output in self.outputs],
                "forwards": [output.forwards for output in self.outputs],
                "acceptance": [
                    None if mean is None else round(mean, 4)
                    for mean in map(metrics.mean_acceptance, self.outputs)
                ],
                "seconds": [round(output.seconds, 5) for output in self.outputs],
            },
        }

    def accuracy_fields(self) -> dict[str, Any]:
        if not self.judged_count:
            return {"accuracy": None, "standard_error": None, "interval": None}
        return {
            "accuracy": round(self.accuracy, 4),
            "standard_error": round(self.standard_error, 4),
            "interval": [round(bound, 4) for bound in self.accuracy_interval],
        }

    def speed_fields(self) -> dict[str, Any]:
        lengths = [len(output.ids) for output in self.outputs]
        forwards = [output.forwards for output in self.outputs]
        error = metrics.ratio_error(lengths, forwards)
        return {
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "tokens_per_forward_error": None if math.isnan(error) else round(error, 4),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_answer": round(self.token_count / max(len(lengths), 1), 1),
            "latency": metrics.percentiles([output.seconds for output in self.outputs], 5),
            "first_text": metrics.percentiles(
                list(map(metrics.first_text_seconds, self.outputs)), 5
            ),
        }

    def acceptance_fields(self) -> dict[str, Any]:
        counts = metrics.acceptance_histogram(self.outputs)
        cached, tokens = metrics.token_row_ratio(self.outputs), max(self.token_count, 1)
        rows = {
            model: sum(metrics.count_fed_rows(output, model) for output in self.outputs)
            for model in metrics.model_roles(self.outputs)
        }
        return {
            **{name: sum(getattr(each, name) for each in self.outputs) for name in DRAFT_COUNTS},
            "acceptance_length": round(metrics.acceptance_length(self.outputs), 3),
            "acceptance_histogram": counts,
            "acceptance_by_position": [
                round(share, 4) for share in metrics.acceptance_by_position(counts)
            ],
            "p_cache": None if cached is None else round(cached, 4),
            "rows_per_token": {model: round(fed / tokens, 3) for model, fed in rows.items()},
            "rows_wasted": metrics.count_wasted_rows(self.outputs),
        }
