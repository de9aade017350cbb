"""What a run came to: how right, how fast, and by how much that may be chance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from outpace.api.output import Output
from outpace.checkpoints.name import short_title
from outpace.evaluation import metrics
from outpace.evaluation.samples import SCHEMA


@dataclass(slots=True, kw_only=True)
class Report:
    """Metrics of one run; only visible output tokens count, never prompt or warm-up.

    `forwards` are passes of the target model, `seconds` is wall time of the answers. `verdicts` are
    None where nobody judges.
    """

    task: str
    model: str
    method: str
    batch: int
    protocol: str = ""
    questions: str = ""
    outputs: list[Output] = field(default_factory=list, repr=False)
    verdicts: list[bool | None] = field(default_factory=list, repr=False)
    seconds: float = 0.0

    def add(self, output: Output, right: bool | None) -> None:
        """Count one answer."""
        self.outputs.append(output)
        self.verdicts.append(right)

    @property
    def correct(self) -> int:
        """Answers that are right."""
        return sum(right is True for right in self.verdicts)

    @property
    def judged(self) -> int:
        """Answers that somebody has judged."""
        return sum(right is not None for right in self.verdicts)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / max(self.judged, 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(self.judged, 1))

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of 95 % of the accuracy (Wilson, 1927)."""
        return metrics.wilson(self.correct, self.judged)

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(output.ids) for output in self.outputs)

    @property
    def tokens_per_forward(self) -> float:
        """All output tokens over all forwards of the target."""
        return self.tokens / max(sum(output.forwards for output in self.outputs), 1)

    @property
    def tokens_per_second(self) -> float:
        """All output tokens over the wall time of the run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def cut(self) -> list[int]:
        """Tokens of each answer that did not end by itself."""
        return [len(each.ids) for each in self.outputs if each.finish_reason == "length"]

    def summary(self) -> dict[str, Any]:
        """The figures as they are written to JSON; `samples` has a column for each of a few."""
        return {
            "schema": SCHEMA,
            "task": self.task,
            "protocol": self.protocol,
            "questions": self.questions,
            "model": short_title(self.model),
            "method": self.method,
            "batch": self.batch,
            "problems": len(self.outputs),
            **self.accuracies(),
            **self.speeds(),
            **self.acceptance(),
            "unfinished": len(self.cut),
            "cut_at": max(self.cut, default=None),
            "seconds": round(self.seconds, 2),
            "samples": {
                "right": self.verdicts,
                "tokens": [len(output.ids) for output in self.outputs],
                "forwards": [output.forwards for output in self.outputs],
                "seconds": [round(output.seconds, 5) for output in self.outputs],
            },
        }

    def accuracies(self) -> dict[str, Any]:
        """Accuracy with its error; None where nobody judges."""
        if not self.judged:
            return {"accuracy": None, "standard_error": None, "interval": None}
        return {
            "accuracy": round(self.accuracy, 4),
            "standard_error": round(self.standard_error, 4),
            "interval": [round(bound, 4) for bound in self.interval],
        }

    def speeds(self) -> dict[str, Any]:
        """Tokens by forward and by second, and seconds of an answer."""
        lengths = [len(output.ids) for output in self.outputs]
        forwards = [output.forwards for output in self.outputs]
        error = metrics.ratio_error(lengths, forwards)
        took = [output.seconds for output in self.outputs]
        first = [metrics.first_text(output) for output in self.outputs]
        return {
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "tokens_per_forward_error": None if math.isnan(error) else round(error, 4),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_answer": round(self.tokens / max(len(lengths), 1), 1),
            "latency": {f"p{p}": round(metrics.percentile(took, p / 100), 5) for p in (50, 95)},
            "first_text": {f"p{p}": round(metrics.percentile(first, p / 100), 5) for p in (50, 95)},
        }

    def acceptance(self) -> dict[str, Any]:
        """What forwards kept, and rows that were fed for it."""
        counts = metrics.histogram(self.outputs)
        cached, tokens = metrics.p_cache(self.outputs), max(self.tokens, 1)
        rows = {
            model: sum(metrics.rows_fed(output, model) for output in self.outputs)
            for model in metrics.models(self.outputs)
        }
        return {
            "acceptance_length": round(metrics.acceptance_length(self.outputs), 3),
            "acceptance_histogram": counts,
            "acceptance_by_position": [round(share, 4) for share in metrics.by_position(counts)],
            "p_cache": None if cached is None else round(cached, 4),
            "rows_per_token": {model: round(fed / tokens, 3) for model, fed in rows.items()},
            "rows_wasted": metrics.wasted(self.outputs),
        }
