"""Paths that the user gives: of models by their names in a figure, and of files by task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outpace.benchmark.reproduce.figure import DATA_FOLDER, Scale
from outpace.errors import OptionError
from outpace.evaluation.tasks import TASKS


def model_paths(texts: Iterable[str], plans: Sequence[Scale]) -> dict[str, str]:
    """Return paths by name, from NAME=PATH; `OptionError` for a model that no plan needs."""
    known = list(dict.fromkeys(name for plan in plans for name in plan.given))
    paths: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not known:
            message = f"--model {text}: this scale names its models; omit it, or use --scale small"
            raise OptionError("model", text, message)
        if name not in known or name in paths or not path:
            message = f"--model {text}: give each of {', '.join(known)} once, as NAME=PATH"
            raise OptionError("model", text, message)
        paths[name] = path
    return paths


def task_files(texts: Iterable[str], plans: Sequence[Scale]) -> dict[str, str]:
    """Return files by task, from TASK=FILE or a file alone; `OptionError` for other tasks."""
    tasks = list(dict.fromkeys(plan.task for plan in plans))
    files = {task: str(DATA_FOLDER / name) for plan in plans for task, name in plan.data.items()}
    for text in texts:
        task, _, path = text.partition("=")
        if task not in TASKS:
            if len(tasks) > 1:
                message = f"--data {text}: write TASK=FILE, for each of {', '.join(tasks)}"
                raise OptionError("data", text, message)
            task, path = tasks[0], text
        if task not in tasks or not path:
            message = f"--data {text}: write TASK=FILE; tasks here are {', '.join(tasks)}"
            raise OptionError("data", text, message)
        files[task] = path
    return files
