"""Generated grade-school word problems with worked solutions in GSM8K's format.

A template is data: wordings of a question and, for each step, an equation over named quantities
with wordings of its sentence. All equations are in one small table, so that a problem is made by
looking up equations that agree with the quantities drawn so far.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from random import Random
from typing import Any

from outpace.data.generated import Problem, ProblemSplits

Equation = tuple[int, int, int]

STORY_SPLITS = ProblemSplits(("train", "test", "unseen"), test_every=50)
MAX_SUM = 70  # a small model can learn every equation up to this sum

MALE_NAMES = (
    "Tom Ben Sam Max Leo Dan Tim Jack Adam Paul Mark Luke Omar Ivan Hugo Noah Eric Finn Carl Ravi"
)
FEMALE_NAMES = (
    "Amy Eva Mia Zoe Ann Lucy Kate Emma Sara Nina Rosa Lena Jane Ella Lily Maya Ruth Vera Iris"
)
PRONOUNS = dict.fromkeys(MALE_NAMES.split(), ("he", "his", "him"))
PRONOUNS |= dict.fromkeys(FEMALE_NAMES.split(), ("she", "her", "her"))
PERSON_NAMES = tuple(PRONOUNS)


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One equation over names of quantities or literal numbers, with wordings for it."""

    left: str
    op: str
    right: str
    result: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoryTemplate:
    """A kind of story: its subjects, its question, and the steps that solve it."""

    things: tuple[str, ...]
    questions: tuple[str, ...]
    steps: tuple[StoryStep, ...]
    constants: dict[str, int]
    search: tuple[StoryStep, ...]


def story_problems(
    split: str, count: int, *, seed: int = 0, start: int = 0, plain: bool = False
) -> list[Problem]:
    """Return problems `start` to `start + count` of a split; each depends only on its index.

    Args:
        split: Name of the split.
        count: Number of problems.
        seed: Seed of all problems.
        start: Index of the first problem.
        plain: Whether answers use the first wording of each sentence, so that they follow from the
            question.
    """
    return [
        draw_story(split, rng, plain)
        for rng in STORY_SPLITS.random_sources(split, count, seed, start)
    ]


def draw_drill(rng: Random) -> str:
    """Return a line of six to eight equations, with the distribution of training problems."""
    equations: list[str] = []
    count = rng.randint(6, 8)
    while len(equations) < count:
        template = rng.choice(load_templates()["train"])
        values = draw_quantities(template, rng)
        equations += [
            annotate_result(format_term(step, values), values[step.result])
            for step in template.steps
        ]
    return "".join(f" {equation}" for equation in equations[:count])


def draw_story(split: str, rng: Random, plain: bool) -> Problem:
    """Draw a story; questions of another split are drawn again."""
    while True:
        template = rng.choice(load_templates()["unseen" if split == "unseen" else "train"])
        values = draw_quantities(template, rng)
        fields: dict[str, int | str] = {**values, **draw_cast(template, rng)}
        question = rng.choice(template.questions).format_map(fields)
        if STORY_SPLITS.contains(split, question):
            return Problem(
                question, write_solution(template, values, fields, None if plain else rng)
            )


def write_solution(
    template: StoryTemplate,
    values: dict[str, int],
    fields: dict[str, int | str],
    rng: Random | None,
) -> str:
    """Return the worked solution: one sentence per step, then the result.

    Each sentence has a random wording, or the first one if `rng` is None.
    """
    sentences = []
    for step in template.steps:
        left, result = format_term(step, values), values[step.result]
        fields["eq"] = f"{left}={annotate_result(left, result)}"
        wording = rng.choice(step.sentences) if rng else step.sentences[0]
        sentences.append(wording.format_map(fields))
    return f"{' '.join(sentences)}\n#### {values[template.steps[-1].result]}"


def format_term(step: StoryStep, values: dict[str, int]) -> str:
    return f"{values[step.left]}{step.op}{values[step.right]}"


def annotate_result(term: str, result: int) -> str:
    """Return GSM8K's calculator annotation with the result: `<<4*6=24>>24`."""
    return f"<<{term}={result}>>{result}"


def draw_cast(template: StoryTemplate, rng: Random) -> dict[str, str]:
    name, friend = rng.sample(PERSON_NAMES, 2)
    thing, other = rng.sample(template.things, 2)
    he, his, him = PRONOUNS[name]
    people = {"name": name, "friend": friend, "he": he, "his": his, "him": him}
    return people | {"He": he.title(), "His": his.title(), "thing": thing, "other": other}


def draw_quantities(template: StoryTemplate, rng: Random) -> dict[str, int]:
    """Draw numbers for all names of a template, so that every step is an equation of the table."""
    while True:
        values = dict(template.constants)
        for step in template.search:
            constraint = values.get(step.left), values.get(step.right), values.get(step.result)
            if not (choices := equation_index().get((step.op, *constraint))):
                break
            values[step.left], values[step.right], values[step.result] = rng.choice(choices)
        else:
            return values


def all_equations() -> Iterator[tuple[str, Equation]]:
    """Yield every equation of the stories: sums up to `MAX_SUM`, small products, inverses."""
    numbers = range(2, MAX_SUM)
    for x, y in product(numbers, numbers):
        if x + y <= MAX_SUM:
            yield "+", (x, y, x + y)
            yield "-", (x + y, x, y)
    for x, y in product(range(2, 13), (*range(2, 13), 20)):
        if min(x, y) < 10 and x * y <= 100:
            yield "*", (x, y, x * y)
            yield "/", (x * y, x, y)


@cache
def equation_index() -> dict[tuple[str, int | None, int | None, int | None], list[Equation]]:
    """Return the equations by operation and any choice of known numbers (None: unknown)."""
    index = defaultdict(list)
    for op, equation in all_equations():
        for x, y, z in product(*((number, None) for number in equation)):
            index[op, x, y, z].append(equation)
    return dict(index)


def parse_story_template(entry: dict[str, Any]) -> StoryTemplate:
    steps = tuple(parse_step(*step) for step in entry["steps"])
    # Products and quotients fit least often, so they are drawn first, and from the end: a factor
    # is small, while any sum or product may have to result in it.
    scarce = [step for step in reversed(steps) if step.op in "*/"]
    names = {name for step in steps for name in (step.left, step.right, step.result)}
    return StoryTemplate(
        things=tuple(entry["things"]),
        questions=tuple(entry["questions"]),
        steps=steps,
        constants={name: int(name) for name in names if name.isdigit()},
        search=(*scarce, *(step for step in steps if step.op in "+-")),
    )


def parse_step(equation: str, *sentences: str) -> StoryStep:
    result, term = equation.split("=")
    left, op, right = re.split(r"([-+*/])", term)
    return StoryStep(left, op, right, result, sentences)


@cache
def load_templates() -> dict[str, tuple[StoryTemplate, ...]]:
    stories = json.loads(files(__package__).joinpath("stories.json").read_text("utf-8"))
    return {kind: tuple(map(parse_story_template, entries)) for kind, entries in stories.items()}


def main(words: list[str]) -> None:
    """Print questions as JSON Lines: prompts for `outpace generate`."""
    match words:
        case [split, count] if count.isdecimal():
            for problem in story_problems(split, int(count)):
                print(json.dumps({"prompt": problem.question}))
        case _:
            sys.exit("usage: python -m outpace.data.generated.story SPLIT COUNT > PROMPTS.jsonl")


if __name__ == "__main__":
    main(sys.argv[1:])
