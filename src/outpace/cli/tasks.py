"""Tasks of lm-evaluation-harness, unmodified: `evaluate --tasks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.cli.draw import console
from outpace.errors import OptionError
from outpace.evaluation.report import EvaluationReport


@dataclass(frozen=True, kw_only=True)
class HarnessFlags:
    """Flags of the tasks, and of their prompts."""

    tasks: Annotated[
        str | None, Option(help="Tasks of lm-evaluation-harness, separated by commas.")
    ] = None
    include: Annotated[str | None, Option(help="Folder with custom tasks.")] = None
    chat: Annotated[
        bool, Option("--chat", help="Apply the chat template to the prompts of --tasks.")
    ] = False
    system: Annotated[str | None, Option(help="System prompt of --tasks.")] = None
    draws: Annotated[int, Option(help="Random masks per likelihood of a diffusion model.")] = 128

    def run_harness(
        self,
        llm: LLM,
        *,
        options: Options,
        batch: int,
        shots: int | None,
        limit: int,
        samples: Path | None,
    ) -> tuple[dict[str, Any], EvaluationReport]:
        """Run the tasks; returns the harness's results, and the report of decoding."""
        from outpace.evaluation.harness import OutpaceHarness, request_key, run_tasks

        assert self.tasks is not None
        if extra := [name for name in options if name not in ("max_tokens", "seed")]:
            message = f"{extra[0]} cannot be set: tasks of lm-evaluation-harness set it"
            raise OptionError(extra[0], dict(options)[extra[0]], message)
        harness = OutpaceHarness(
            llm,
            batch_size=batch,
            max_tokens=options.get("max_tokens") or 256,
            seed=options.get("seed", 0),
            draws=self.draws,
            samples=samples,
        )
        results = run_tasks(
            harness,
            [name.strip() for name in self.tasks.split(",")],
            include=self.include,
            shots=shots,
            limit=limit,
            chat=self.chat,
            system=self.system,
        )
        report = EvaluationReport(
            task=self.tasks, model=llm.name, method=repr(llm.method), batch=batch
        )
        report.outputs, report.seconds = harness.outputs, harness.seconds
        report.questions = request_key("questions", harness.questions)
        report.verdicts = [None] * len(harness.outputs)
        return results, report


def show_harness_results(results: Mapping[str, Any]) -> None:
    """Print the metrics of the harness."""
    table = Table(header_style="bold")
    for name in ("task", "metric", "value"):
        table.add_column(name)
    for task, figures in results["results"].items():
        for metric, value in figures.items():
            if isinstance(value, float) and not metric.startswith("sample"):
                table.add_row(task, metric.removesuffix(",none"), f"{value:.4f}")
    console.print(table)
