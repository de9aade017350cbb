"""Flags that select an evaluation task, its protocol and its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Option

from outpace.cli.flags import SystemFlag, TemplateFlag, parse_variable
from outpace.errors import OptionError
from outpace.field_types import check_at_least_one
from outpace.lab.protocol import PROTOCOLS, Question, Setting, find_setting
from outpace.lab.tasks import JUDGES, OWN, TASKS


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    """A task, the protocol for its prompts, and what replaces parts of it."""

    task: Annotated[str | None, Option(help=f"Task: {', '.join(TASKS)}; story by default.")] = None
    protocol: Annotated[
        str, Option(help=f"Protocol: {', '.join(PROTOCOLS)}, or a TOML file; NAME:SETTING.")
    ] = "plain"
    data: Annotated[
        str | None,
        Option(help="Data file of the task; without --task, lines of question and answer."),
    ] = None
    judge: Annotated[
        str | None,
        Option(help=f"Scoring rule for such lines: {', '.join(JUDGES)}; exact by default."),
    ] = None
    shots: Annotated[
        str | None, Option(help="File of few-shot examples, in the format of --data.")
    ] = None
    num_shots: Annotated[
        int | None, Option(help="Number of shots, in place of the protocol's.")
    ] = None
    system: SystemFlag = None
    template: TemplateFlag = None

    def load_setting(self) -> Setting:
        """Load the setting of the protocol; raises `ValueError` for an unknown one."""
        return self.change_setting(find_setting(self.task_name(), self.protocol))

    def change_setting(self, setting: Setting) -> Setting:
        """Return a setting with the shots, system prompt and template variables of the flags."""
        changes: dict[str, Any] = {"shots": self.num_shots, "system": self.system}
        changes = {name: value for name, value in changes.items() if value is not None}
        variables = {**setting.variables, **self.variables()}
        return replace(setting, **changes, variables=variables)

    def replace_task(self, option: str, value: object, setting: Setting) -> Setting:
        """Return a setting in place of the task's; raises `OptionError` for flags of the task."""
        if replace(self, template=None) != TASK_FLAGS:
            raise OptionError(option, value, "cannot be combined with --task and related flags")
        return self.change_setting(setting)

    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        return dict(map(parse_variable, self.template or ()))

    def task_name(self) -> str:
        """Return the task; a data file without a task is a custom task."""
        if self.judge is not None and (self.task is not None or self.data is None):
            raise ValueError(
                "--judge applies to lines of question and answer: give --data without --task"
            )
        if self.judge is not None and self.judge not in JUDGES:
            raise OptionError(
                "judge", self.judge, f"unknown judge {self.judge!r}; judges are {', '.join(JUDGES)}"
            )
        if self.data is not None and self.task is None:
            return f"{OWN}{self.judge or 'exact'}"
        return self.task or "story"

    def load_questions(self, limit: int) -> list[Question]:
        """Load `limit` questions; raises `ValueError` for a bad file, or a limit below 1."""
        check_at_least_one(limit=limit)
        return self.load_setting().load_questions(self.data, limit, self.shots)


TASK_FLAGS = TaskFlags()
