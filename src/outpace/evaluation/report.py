"""Report of a run: accuracy and speed, with their statistical errors."""

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
    """Metrics of one run. Only output tokens count, never prompts or the warm-up.

    Attributes:
        task: Name of the task.
        model: Name of the model.
        method: The method with its options.
        batch: Number of concurrent requests.
        protocol: Name of the protocol.
        questions: Hash of the questions.
        outputs: The answers.
        verdicts: Whether each answer is correct; None if it is not judged.
        seconds: Wall time of the answers.
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
        """Add one answer with its verdict."""
        self.outputs.append(output)
        self.verdicts.append(right)

    @property
    def correct(self) -> int:
        """Number of correct answers."""
        return sum(right is True for right in self.verdicts)

    @property
    def judged(self) -> int:
        """Number of judged answers."""
        return sum(right is not None for right in self.verdicts)

    @property
    def accuracy(self) -> float:
        """Share of correct answers among the judged ones."""
        return self.correct / max(self.judged, 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(self.judged, 1))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson, 1927)."""
        return metrics.wilson(self.correct, self.judged)

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(output.ids) for output in self.outputs)

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens per forward of the target."""
        return self.tokens / max(sum(output.forwards for output in self.outputs), 1)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def cut(self) -> list[int]:
        """Lengths of the answers that reached the token limit."""
        return [len(each.ids) for each in self.outputs if each.finish_reason == "length"]

    def summary(self) -> dict[str, Any]:
        """Return the metrics as JSON fields; `samples` has per-answer columns."""
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
        """Return accuracy with its error; None if nothing was judged."""
        if not self.judged:
            return {"accuracy": None, "standard_error": None, "interval": None}
        return {
            "accuracy": round(self.accuracy, 4),
            "standard_error": round(self.standard_error, 4),
            "interval": [round(bound, 4) for bound in self.interval],
        }

    def speeds(self) -> dict[str, Any]:
        """Return tokens per forward and per second, and latencies."""
        lengths = [len(output.ids) for output in self.outputs]
        forwards = [output.forwards for output in self.outputs]
        error = metrics.ratio_error(lengths, forwards)
        latencies = [output.seconds for output in self.outputs]
        first = [metrics.first_text(output) for output in self.outputs]
        return {
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "tokens_per_forward_error": None if math.isnan(error) else round(error, 4),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_answer": round(self.tokens / max(len(lengths), 1), 1),
            "latency": {
                f"p{p}": round(metrics.percentile(latencies, p / 100), 5) for p in (50, 95)
            },
            "first_text": {f"p{p}": round(metrics.percentile(first, p / 100), 5) for p in (50, 95)},
        }

    def acceptance(self) -> dict[str, Any]:
        """Return acceptance lengths and fed rows."""
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
