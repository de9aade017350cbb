"""Evaluate a method on questions; interrupted runs resume from a file of answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from outpace.api.answers import Answering
from outpace.api.llm import LLM
from outpace.api.options import Options, RequestOptions
from outpace.evaluation.protocol import setting
from outpace.evaluation.question import Question
from outpace.evaluation.report import Report
from outpace.evaluation.samples import digest, kept, written
from outpace.jsonl import Record

IDENTITY = ("task", "protocol", "questions", "model", "method", "batch")
"""Report fields that must match an earlier run to resume it, in addition to the options."""


def questions_of(task: str, limit: int, path: str | None = None) -> list[Question]:
    """Return zero-shot questions of a task.

    Raises:
        ValueError: If the task is unknown or `limit` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    return setting(task).questions(path, limit, None)


def evaluate(
    llm: Answering,
    questions: Sequence[Question],
    *,
    task: str = "",
    protocol: str = "",
    batch: int = 1,
    samples: Path | None = None,
    progress: Callable[[Report], None] = lambda report: None,
    **options: Unpack[Options],
) -> Report:
    """Answer all questions, `batch` at a time, then judge the answers.

    One uncounted answer warms up a model in this process.

    Args:
        llm: The model.
        questions: The questions.
        task: Name of the task, for the report.
        protocol: Name of the protocol, for the report.
        batch: Number of concurrent requests.
        samples: File of answers. Those already in it are not decoded again.
        progress: Called with the report after each answer.
        options: Options of all requests.

    Raises:
        ValueError: If there are no questions, one does not fit, or the file is of another run.
    """
    if not questions:
        raise ValueError("questions must not be empty")
    method = RequestOptions.of(options).method or llm.method
    report = Report(
        task=task,
        protocol=protocol,
        questions=digest(questions),
        model=llm.name,
        method=repr(method),
        batch=batch,
    )
    shared_options = {name: value for name, value in options.items() if name != "method"}
    header = {name: getattr(report, name) for name in IDENTITY} | {"options": shared_options}
    with kept(samples, header) as answers:
        outputs = answers.outputs(answers.records)
        report.seconds = max((record["clock"] for record in answers.records.values()), default=0.0)
        todo = [number for number in range(len(questions)) if number not in outputs]
        results = llm.serve(((questions[n].prompt, options) for n in todo), batch=batch)
        if todo and isinstance(llm, LLM):
            llm.generate([questions[0].prompt], **options)
        began = time.perf_counter() - report.seconds
        report.outputs = list(outputs.values())
        for index, output in results:
            report.seconds = time.perf_counter() - began
            outputs[todo[index]] = output
            answers.add(todo[index], {"clock": report.seconds, **written(output)})
            report.outputs.append(output)
            progress(report)
        report.outputs = [outputs[number] for number in range(len(questions))]
    pairs = zip(questions, report.outputs, strict=True)
    report.verdicts = [question.right(output.text) for question, output in pairs]
    return report


def fitted(llm: LLM, questions: Sequence[Question], options: Options) -> Options:
    """Return options whose `max_tokens` fit after the longest prompt.

    Raises:
        ValueError: If a prompt cannot be encoded.
    """
    request_options = RequestOptions.of(options)
    method = request_options.method or llm.method
    encode = partial(llm.text.encode, raw=request_options.raw, template=request_options.template)
    longest = max(len(encode(question.prompt)) for question in questions)
    room = max(llm.pair(method).room(method, longest), 1)
    return {**options, "max_tokens": min(options["max_tokens"] or room, room)}


def judged(questions: Sequence[Question], report: Report) -> Iterator[Record]:
    """Yield each question with its answer and verdict as JSON fields."""
    for number, question in enumerate(questions):
        output = report.outputs[number]
        yield {
            "number": number,
            "question": question.prompt,
            "reference": question.reference,
            "answer": output.text,
            "right": report.verdicts[number],
            "finish_reason": output.finish_reason,
            "tokens": len(output.ids),
            "forwards": output.forwards,
        }
