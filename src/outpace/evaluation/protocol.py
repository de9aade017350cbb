"""How papers ask: shots, system prompt, template, lengths, sampling, scoring, as data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outpace.api.options import Options
from outpace.api.text import Prompt
from outpace.decoding import Kind
from outpace.evaluation.question import Question
from outpace.evaluation.scoring import NEEDED, SCORERS
from outpace.evaluation.tasks import TASKS
from outpace.jsonl import Record
from outpace.methods import Method
from outpace.methods.bounds import at_least_one
from outpace.methods.options import make_method

FOLDER = Path(__file__).parent / "protocols"
PROTOCOLS = ("apd", "d2f", "dflash", "plain", "wedlm")
NAMED = re.compile(r"\{([A-Za-z]\w*)(?:\[(\d+)\])?\}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to ask the lines of a task, and what was published of it.

    Attributes:
        task: name of the task.
        name: of this setting among those of its task in a protocol.
        harness: what lm-evaluation-harness calls the task.
        model, adapter: checkpoints of the published numbers.
        template: the question, with `{fields}` of its line; None where only the harness has it.
        shot: what stands behind the template in a shot.
        shots: how many there are.
        held_out: whether they are the first lines of the file, which are then not asked.
        intro, between: what stands in front of all else, and between shots.
        system: system prompt.
        turns: whether shots are turns of a conversation.
        raw: whether the text goes on as it stands, without chat template.
        stop: strings that end an answer.
        score: the rule that judges.
        max_tokens, temperature, top_p: of the answers.
        canvas: `max_tokens` of diffusion models, which decode all of it, where theirs is another.
        method: name and options of the method.
        published: figures and their place in the paper, percent and seconds.
    """

    task: str
    name: str = ""
    harness: str | None = None
    model: str | None = None
    adapter: str | None = None
    template: str | None = None
    shot: str | None = None
    shots: int = 0
    held_out: bool = False
    intro: str = ""
    between: str = "\n\n"
    system: str | None = None
    turns: bool = False
    raw: bool = False
    stop: Sequence[str] = ()
    score: str = "exact"
    max_tokens: int = 1024
    temperature: float | None = None
    top_p: float | None = None
    canvas: int | None = None
    method: Mapping[str, Any] | None = None
    published: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` for what cannot be asked."""
        if self.score not in SCORERS:
            raise ValueError(f"unknown score {self.score!r}; known are {', '.join(SCORERS)}")
        if self.raw and (self.system is not None or self.turns):
            raise ValueError("raw text has neither system prompt nor turns")
        if self.template is not None and self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}; known are {', '.join(TASKS)}")
        if self.shots < 0 or self.shots and self.template and self.shot is None:
            raise ValueError(f"shots={self.shots} of {self.task} need a text as shot")
        at_least_one(max_tokens=self.max_tokens, canvas=self.canvas)

    def decoder(self) -> Method | None:
        """The method of the published numbers; None where there is none."""
        if self.method is None:
            return None
        options = dict(self.method)
        return method_of(options.pop("name"), options)

    def options(self, given: Options) -> Options:
        """Options of a request: those that are given, and else those of the paper."""
        chosen = {name: value for name, value in given.items() if value is not None}
        own = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p")}
        usual = Options(stop=tuple(self.stop), raw=self.raw, method=self.decoder())
        method = chosen.get("method", usual["method"])
        if self.canvas and isinstance(method, Method) and Kind.DIFFUSION in method.decodes:
            own["max_tokens"] = self.canvas
        return {**own, **usual, **chosen}  # type: ignore[typeddict-item]

    def questions(self, path: str | None, limit: int, shots: str | None) -> list[Question]:
        """The first lines of a task, asked in this way.

        `path` is the file of the task and `shots` that of its shots. Raises `ValueError` where
        there is none, and for a bad line; `OSError` where the answers could not be judged here.
        """
        if self.template is None:
            raise ValueError(
                f"{self.task} is asked by lm-evaluation-harness alone: use --tasks {self.harness}"
            )
        NEEDED.get(self.score, lambda: None)()
        self.check_shots(shots)
        task, first = TASKS[self.task], self.shots if self.held_out else 0
        lines = task.lines(path, limit + first)
        apart = self.shots and shots is not None
        examples = task.lines(shots, self.shots) if apart else lines[:first]
        if len(examples) < self.shots or not lines[first:]:
            raise ValueError(
                f"{self.shots} shots and a question are more than the {len(lines)} lines of "
                f"{shots or path}"
            )
        return [
            Question(self.prompt(line, examples), task.reference(line), self.score)
            for line in lines[first:]
        ]

    def check_shots(self, shots: str | None) -> None:
        """Raise `ValueError` for a file of shots that is missing, or that nobody asks for."""
        own = self.held_out or not self.shots
        if shots is not None and own:
            raise ValueError(
                f"{self.task} is asked here {'with its own' if self.held_out else 'without'} "
                "shots: leave --shots out, or say how many with --num-shots"
            )
        if shots is None and not own:
            raise ValueError(
                f"{self.task} is asked here with {self.shots} shots: name a file of them with "
                "--shots, such as lines of the training split, or ask with --num-shots 0"
            )

    def prompt(self, line: Record, examples: Sequence[Record]) -> Prompt:
        """A line with its shots: text, or messages where there are several."""
        assert self.template is not None
        asked = filled(self.template, line)
        pairs = [(filled(self.template, e), filled(self.shot or "", e)) for e in examples]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        if self.turns:
            texts = [text for pair in pairs for text in pair]
            texts = [self.intro + texts[0], *texts[1:], asked] if texts else [self.intro + asked]
            roles = ("user", "assistant")
            turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
            return [*system, *turns]
        text = self.intro + self.between.join([*map("".join, pairs), asked])
        return [*system, {"role": "user", "content": text}] if system else text


def method_of(name: str, options: Mapping[str, Any]) -> Method:
    """A method by name, with options as files have them: `none` is None.

    Raises `ValueError` for an unknown method or option, or a bad value.
    """
    values = {option: None if value == "none" else value for option, value in options.items()}
    return make_method(name, values)


def filled(template: str, line: Record) -> str:
    """A template with the fields of a line; lists stand one below the other."""

    def text(found: re.Match[str]) -> str:
        value = line.get(found[1])
        if isinstance(value, list):
            value = "\n".join(value if found[2] is None else value[int(found[2]) :][:1])
        if not isinstance(value, str):
            raise ValueError(f"a line has no text as {found[1]}, which the template names")
        return value

    return NAMED.sub(text, template)


def settings(protocol: str) -> list[Setting]:
    """All settings of a protocol, by name or as a file; `ValueError` for an unknown one."""
    path = FOLDER / f"{protocol}.toml" if protocol in PROTOCOLS else Path(protocol)
    if not path.is_file():
        raise ValueError(f"unknown protocol {protocol!r}; known are {', '.join(PROTOCOLS)}")
    try:
        return list(read(tomllib.loads(path.read_text("utf-8"))))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no protocol: {error}") from error


def read(table: Mapping[str, Any]) -> Iterator[Setting]:
    """Settings of a file; what is said of a task holds for all of them."""
    known = {field.name for field in fields(Setting)}
    for task, shared in table["tasks"].items():
        common = dict(shared)
        for own in common.pop("settings", [{}]):
            values = {**common, **own}
            if unknown := sorted(set(values) - known):
                raise ValueError(f"{task} has no {', '.join(unknown)}")
            yield Setting(task=task, **values)


def setting(task: str, protocol: str = "plain") -> Setting:
    """The setting of a task in `protocol` or `protocol:name`.

    Raises `ValueError` with those that are known for an unknown task, protocol or name.
    """
    protocol, _, name = protocol.partition(":")
    found = settings(protocol)
    if task not in TASKS and task not in {each.task for each in found}:
        raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
    of_task = {each.name: each for each in found if each.task == task}
    if not of_task:
        known = ", ".join(dict.fromkeys(each.task for each in found))
        raise ValueError(f"{protocol} does not ask {task!r}; it asks {known}")
    if not name and len(of_task) == 1:
        return next(iter(of_task.values()))
    if name not in of_task:
        known = ", ".join(f"{protocol}:{each}".removesuffix(":") for each in of_task)
        what = f"has no {name!r}" if name else "has several ways"
        raise ValueError(f"{protocol} {what} to ask {task}; name one of {known}")
    return of_task[name]
