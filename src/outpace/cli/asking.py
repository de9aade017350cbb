"""Flags of what is asked, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from typer import Option

from outpace.evaluation.protocol import PROTOCOLS, Setting, setting
from outpace.evaluation.question import Question
from outpace.evaluation.tasks import TASKS
from outpace.methods.method import at_least_one


@dataclass(frozen=True, kw_only=True)
class Asking:
    """A task, the way of a protocol to ask it, and files of its lines."""

    task: Annotated[str | None, Option(help=f"One of {', '.join(TASKS)}; story if none.")] = None
    protocol: Annotated[
        str, Option(help=f"How it is asked: {', '.join(PROTOCOLS)}, or a TOML file; NAME:SETTING.")
    ] = "plain"
    data: Annotated[str | None, Option(help="File of the task, where it needs one.")] = None
    shots: Annotated[str | None, Option(help="File of the shots, lines as in --data.")] = None
    num_shots: Annotated[int | None, Option(help="Other than the protocol's.")] = None

    def setting(self) -> Setting:
        """How it is asked; `ValueError` for what is not known."""
        asked = setting(self.task or "story", self.protocol)
        return asked if self.num_shots is None else replace(asked, shots=self.num_shots)

    def questions(self, limit: int) -> list[Question]:
        """So many questions; `ValueError` for a bad file, or a limit below one."""
        at_least_one(limit=limit)
        return self.setting().questions(self.data, limit, self.shots)


ASKING = Asking()
