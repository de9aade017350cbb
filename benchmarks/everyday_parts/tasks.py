"""Prompts of everyday work: code, arithmetic, edits of a file, quotations, prose, JSON."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outpace.lab.run import questions_of

HERE = Path(__file__).parent
EDITS = (
    "Rename the class Shelf to Library, its method put to add, and out to lend.",
    "Add type annotations to all parameters and results.",
    "Translate the comments and docstrings into German. Change nothing else.",
)
"""Changes of a file of 60 lines; the answer repeats most of the file."""

QUOTATIONS = (
    "Summarize the text in three sentences. Quote one whole sentence of it word by word in each.",
    "List the five most important facts of the text, each with the sentence that it is taken from.",
    "Answer with quotations only: why did the town move its market, and what did that cost?",
)
PEOPLE = (
    "Anna Berg, 34, lives in Oslo. She works as a carpenter and speaks Norwegian and German.",
    "Luis Ortega is a 58 year old teacher from Quito who speaks Spanish, Quechua and English.",
    "Mei Tanaka, a nurse of 27 years in Osaka, speaks Japanese.",
    "Tom Reed drives a bus in Leeds. He is 45 and speaks English and some French.",
)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"type": "string", "maxLength": 40},
        "job": {"type": "string", "maxLength": 40},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "city", "job", "languages"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts of one kind, the most tokens of an answer, and a JSON schema that answers obey."""

    name: str
    prompts: list[str]
    max_tokens: int
    schema: dict[str, Any] | None = None


def fence(text: str, language: str = "") -> str:
    """A text as a block of code in Markdown."""
    return f"```{language}\n{text.strip()}\n```"


def build_tasks(options: argparse.Namespace) -> list[Task]:
    """Tasks of which the data are given, with at most `options.limit` prompts each."""
    code, text = ((HERE / name).read_text("utf-8") for name in ("shelf.txt", "market.txt"))
    edits = [f"{edit} Answer with the whole file.\n\n{fence(code, 'python')}" for edit in EDITS]
    prose = [str(each.prompt) for each in questions_of("prose", options.limit)]
    people = [f"Give the person as JSON: {person}" for person in PEOPLE]
    tasks = [
        Task(name="rewrite", prompts=edits, max_tokens=700),
        Task(name="quote", prompts=[f"{each}\n\n{text}" for each in QUOTATIONS], max_tokens=200),
        Task(name="prose", prompts=prose, max_tokens=200),
        Task(name="json", prompts=people, max_tokens=120, schema=PERSON),
    ]
    for name, path, max_tokens in (
        ("humaneval", options.humaneval, 256),
        ("gsm8k", options.gsm8k, 256),
    ):
        if path is not None:
            prompts = [str(each.prompt) for each in questions_of(name, options.limit, str(path))]
            tasks.insert(0, Task(name=name, prompts=prompts, max_tokens=max_tokens))
    return [
        replace(task, prompts=task.prompts[: options.limit])
        for task in tasks
        if not options.only or task.name in options.only
    ]
