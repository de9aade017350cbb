"""Evaluates a method on questions: first all answers, which may go on where a run was killed."""

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
"""What a run must share with an earlier one to go on with it, beside its options."""


def questions_of(task: str, limit: int, path: str | None = None) -> list[Question]:
    """Questions of a task by name, bare; `ValueError` for an unknown one."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
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

    `samples` is a file to which each answer is added as it ends; those of an earlier run of the
    same are not asked for again. `progress` is called after each answer. Where the model is in
    this process, one answer runs first without being counted. Raises `ValueError` where there is no
    question, no room for one, or where the file holds another run.
    """
    if not questions:
        raise ValueError("there is no question to evaluate on")
    method = RequestOptions.of(options).method or llm.method
    report = Report(
        task=task,
        protocol=protocol,
        questions=digest(questions),
        model=llm.name,
        method=repr(method),
        batch=batch,
    )
    asked = {name: value for name, value in options.items() if name != "method"}
    header = {name: getattr(report, name) for name in IDENTITY} | {"options": asked}
    with kept(samples, header) as answers:
        known = answers.outputs(answers.records)
        report.seconds = max((record["clock"] for record in answers.records.values()), default=0.0)
        todo = [number for number in range(len(questions)) if number not in known]
        coming = llm.serve(((questions[n].prompt, options) for n in todo), batch=batch)
        if todo and isinstance(llm, LLM):
            llm.generate([questions[0].prompt], **options)
        began = time.perf_counter() - report.seconds
        report.outputs = list(known.values())
        for index, output in coming:
            report.seconds = time.perf_counter() - began
            known[todo[index]] = output
            answers.add(todo[index], {"clock": report.seconds, **written(output)})
            report.outputs.append(output)
            progress(report)
        report.outputs = [known[number] for number in range(len(questions))]
    pairs = zip(questions, report.outputs, strict=True)
    report.verdicts = [question.right(output.text) for question, output in pairs]
    return report


def fitted(llm: LLM, questions: Sequence[Question], options: Options) -> Options:
    """Options with no more `max_tokens` than fit after the longest prompt.

    Raises `ValueError` for a prompt that cannot be encoded.
    """
    chosen = RequestOptions.of(options)
    method = chosen.method or llm.method
    encode = partial(llm.text.encode, raw=chosen.raw, template=chosen.template)
    longest = max(len(encode(question.prompt)) for question in questions)
    room = max(llm.pair(method).room(method, longest), 1)
    return {**options, "max_tokens": min(options["max_tokens"] or room, room)}


def judged(questions: Sequence[Question], report: Report) -> Iterator[Record]:
    """Each question with its answer and what was judged of it, for a file beside a report."""
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
