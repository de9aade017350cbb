"""Evaluate a method on questions; interrupted runs resume from a file of answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from outpace.api.llm import LLM
from outpace.api.options import Options, RequestOptions
from outpace.errors import OptionError
from outpace.jsonl import JsonRecord
from outpace.lab.protocol import Question, Setting, find_setting
from outpace.lab.report import EvaluationReport
from outpace.lab.samples import output_record, questions_hash, resume_samples

RUN_IDENTITY_FIELDS = ("task", "protocol", "questions", "model", "method", "batch")
"""Report fields that must match an earlier run to resume it, in addition to the options."""


def questions_of(task: str, limit: int, path: str | None = None) -> list[Question]:
    """Return zero-shot questions of a task.

    Raises:
        ValueError: If the task is unknown or `limit` is less than 1.
    """
    if limit < 1:
        raise OptionError("limit", limit, "must be at least 1")
    return find_setting(task).load_questions(path, limit, None)


def evaluate(
    llm: LLM,
    questions: Sequence[Question],
    *,
    task: str = "",
    protocol: str = "",
    batch: int = 1,
    samples: Path | None = None,
    progress: Callable[[EvaluationReport], None] = lambda report: None,
    **options: Unpack[Options],
) -> EvaluationReport:
    """Answer all questions, `batch` at a time, then judge the answers.

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
    method = llm.methods.select_method(RequestOptions.of(options).method)
    report = EvaluationReport(
        task=task,
        protocol=protocol,
        questions=questions_hash(questions),
        model=llm.name,
        method=repr(method),
        batch=batch,
    )
    shared_options = {name: value for name, value in options.items() if name != "method"}
    header = {name: getattr(report, name) for name in RUN_IDENTITY_FIELDS} | {
        "options": shared_options
    }
    with resume_samples(samples, header) as answers:
        outputs = answers.load_outputs(answers.records)
        report.seconds = max((record["clock"] for record in answers.records.values()), default=0.0)
        todo = [number for number in range(len(questions)) if number not in outputs]
        results = llm.serve(((questions[n].prompt, options) for n in todo), batch=batch)
        if todo:
            llm.generate([questions[0].prompt], **options)  # warms up, not counted
        began = time.perf_counter() - report.seconds
        report.outputs = list(outputs.values())
        for index, output in results:
            report.seconds = time.perf_counter() - began
            outputs[todo[index]] = output
            answers.add_record(todo[index], {"clock": report.seconds, **output_record(output)})
            report.outputs.append(output)
            progress(report)
        report.outputs = [outputs[number] for number in range(len(questions))]
    pairs = zip(questions, report.outputs, strict=True)
    report.verdicts = [question.judge_answer(output.text) for question, output in pairs]
    return report


def resolve_options(
    llm: LLM, setting: Setting, questions: Sequence[Question], request: Options
) -> Options:
    """Return the options of all requests, whose method `request` has.

    A length of the protocol is reduced to the context after the longest prompt.
    """
    options = setting.request_options(request)
    if request.get("max_tokens") is not None:
        return options
    chosen = RequestOptions.of(options)
    method = llm.methods.select_method(chosen.method)
    encode = partial(llm.text.encode, raw=chosen.raw, template=chosen.template)
    longest = max(len(encode(question.prompt)) for question in questions)
    room = max(llm.pair(method).free_tokens(method, longest), 1)
    return {**options, "max_tokens": min(options["max_tokens"] or room, room)}


def judgment_records(
    questions: Sequence[Question], report: EvaluationReport
) -> Iterator[JsonRecord]:
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
            **output.draft_figures,
        }
