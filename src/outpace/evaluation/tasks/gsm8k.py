"""GSM8K (Cobbe et al., 2021), read from a file of JSON lines; not part of this package."""

from __future__ import annotations

import json
from pathlib import Path

from outpace.evaluation.tasks.question import Question, final_number


def gsm8k(limit: int, path: str | None) -> list[Question]:
    """The first problems of a file with `question` and `answer` a line.

    Raises `ValueError` where the file or one of its fields is missing.
    """
    if path is None or not Path(path).is_file():
        raise ValueError(f"no GSM8K file at {path!r}: name one with --data, such as test.jsonl")
    questions = []
    for number, line in enumerate(Path(path).read_text().splitlines()[:limit], 1):
        fields = json.loads(line)
        final = final_number(fields.get("answer", ""))
        if "question" not in fields or final is None:
            raise ValueError(f"{path}, line {number}: needs question, and answer with a ####")
        questions.append(Question(fields["question"], final))
    return questions
