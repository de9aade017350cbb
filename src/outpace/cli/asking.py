"""Flags of what is asked, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from typer import Option

from outpace.errors import OptionError
from outpace.evaluation.protocol import PROTOCOLS, Setting, setting
from outpace.evaluation.question import Question
from outpace.evaluation.tasks import JUDGES, OWN, TASKS
from outpace.methods.bounds import at_least_one


@dataclass(frozen=True, kw_only=True)
class Asking:
    """A task, the way of a protocol to ask it, and files of its lines."""

    task: Annotated[str | None, Option(help=f"One of {', '.join(TASKS)}; story if none.")] = None
    protocol: Annotated[
        str, Option(help=f"How it is asked: {', '.join(PROTOCOLS)}, or a TOML file; NAME:SETTING.")
    ] = "plain"
    data: Annotated[
        str | None, Option(help="File of the task; without one, lines of question and answer.")
    ] = None
    judge: Annotated[
        str | None, Option(help=f"Of such lines: {', '.join(JUDGES)}; exact if none.")
    ] = None
    shots: Annotated[str | None, Option(help="File of the shots, lines as in --data.")] = None
    num_shots: Annotated[int | None, Option(help="Other than the protocol's.")] = None

    def setting(self) -> Setting:
        """How it is asked; `ValueError` for what is not known."""
        asked = setting(self.meant(), self.protocol)
        return asked if self.num_shots is None else replace(asked, shots=self.num_shots)

    def meant(self) -> str:
        """The task: lines of one's own where there is a file and no name of a task."""
        if self.judge is not None and (self.task is not None or self.data is None):
            raise ValueError(
                "--judge is for lines of question and answer: give --data and no --task"
            )
        if self.judge is not None and self.judge not in JUDGES:
            message = f"judge: unknown judge {self.judge!r}; known are {', '.join(JUDGES)}"
            raise OptionError("judge", self.judge, message)
        if self.data is not None and self.task is None:
            return f"{OWN}{self.judge or 'exact'}"
        return self.task or "story"

    def questions(self, limit: int) -> list[Question]:
        """So many questions; `ValueError` for a bad file, or a limit below one."""
        at_least_one(limit=limit)
        return self.setting().questions(self.data, limit, self.shots)


ASKING = Asking()
