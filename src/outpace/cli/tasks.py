"""What `evaluate --tasks` does: tasks of lm-evaluation-harness, unmodified."""

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
from outpace.evaluation.report import Report


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Which tasks, where further ones lie, and how prompts are dressed."""

    tasks: Annotated[
        str | None, Option(help="Tasks of lm-evaluation-harness instead, with commas.")
    ] = None
    include: Annotated[str | None, Option(help="Folder with tasks of one's own.")] = None
    chat: Annotated[bool, Option("--chat", help="Put their prompts into the chat template.")] = (
        False
    )
    system: Annotated[str | None, Option(help="System prompt in front of them.")] = None
    draws: Annotated[int, Option(help="Random masks of a diffusion model's likelihood.")] = 128

    def run(
        self,
        llm: LLM,
        *,
        options: Options,
        batch: int,
        shots: int | None,
        limit: int,
        samples: Path | None,
    ) -> tuple[dict[str, Any], Report]:
        """Results as the harness has them, and what decoding came to."""
        from outpace.evaluation.harness import Harness, key, run_tasks

        assert self.tasks is not None
        if own := [name for name in options if name not in ("max_tokens", "seed")]:
            message = f"{own[0]}: tasks of lm-evaluation-harness bring their own sampling"
            raise OptionError(own[0], dict(options)[own[0]], message)
        harness = Harness(
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
        report = Report(task=self.tasks, model=llm.name, method=repr(llm.method), batch=batch)
        report.outputs, report.seconds = harness.outputs, harness.seconds
        report.questions = key("questions", harness.questions)
        report.verdicts = [None] * len(harness.outputs)
        return results, report


def show(results: Mapping[str, Any]) -> None:
    """Print what the harness has counted."""
    table = Table(header_style="bold")
    for name in ("task", "metric", "value"):
        table.add_column(name)
    for task, figures in results["results"].items():
        for metric, value in figures.items():
            if isinstance(value, float) and not metric.startswith("sample"):
                table.add_row(task, metric.removesuffix(",none"), f"{value:.4f}")
    console.print(table)
