"""Evaluation protocols of papers as data: shots, prompts, lengths, sampling, scoring."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.api.options import Options
from outpace.field_types import PositiveInt, check_fields, read_section
from outpace.jsonl import JsonRecord
from outpace.lab.tasks import TASKS

if TYPE_CHECKING:
    from outpace.api.text import Prompt
    from outpace.methods import Method


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the reference for its answer, and the name of the scoring rule."""

    prompt: Prompt
    reference: Any
    score: str

    def judge_answer(self, answer: str) -> bool | None:
        """Return whether an answer is correct; None for questions without a rule."""
        from outpace.lab.scoring import SCORERS

        return SCORERS[self.score](answer, self.reference)


PROTOCOL_FOLDER = Path(__file__).parent / "protocols"
PROTOCOLS = ("apd", "d2f", "dflash", "plain", "qwen", "wedlm")
TEMPLATE_FIELD = re.compile(r"\{([A-Za-z]\w*)(?:\[(\d+)\])?\}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to prompt a model with the lines of a task, with published results."""

    task: str
    name: str = ""
    """Name of this setting among those of its task in a protocol."""
    harness: str | None = None
    """Name of the task in lm-evaluation-harness."""
    model: str | None = None
    """Checkpoint of the published numbers."""
    adapter: str | None = None
    """Adapter of the published numbers."""
    template: str | None = None
    """The question, with `{fields}` of its line; None if only the harness has it."""
    shot: str | None = None
    """Text after the template in a few-shot example."""
    shots: int = 0
    held_out: bool = False
    """Whether the examples are the first lines of the file, which are then not questions."""
    intro: str = ""
    """Text before everything else."""
    between: str = "\n\n"
    """Text between examples."""
    system: str | None = None
    turns: bool = False
    """Whether examples are turns of a conversation."""
    raw: bool = False
    """Whether the text is continued without a chat template."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    score: str = "exact"
    max_tokens: PositiveInt = 1024
    temperature: float | None = None
    top_p: float | None = None
    canvas: PositiveInt | None = None
    """`max_tokens` for diffusion models, which decode all of it, if different."""
    method: Mapping[str, Any] | None = None
    published: Sequence[Mapping[str, Any]] = ()
    """Published figures and their place in the paper, in percent and seconds."""

    def __post_init__(self) -> None:
        from outpace.lab.scoring import SCORERS

        check_fields(self)
        if self.score not in SCORERS:
            raise ValueError(
                f"score: unknown score {self.score!r}; choose from {', '.join(SCORERS)}"
            )
        if self.raw and (self.system is not None or self.turns):
            raise ValueError("raw cannot be combined with system or turns")
        if self.template is not None and self.task not in TASKS:
            raise ValueError(f"task: unknown task {self.task!r}; choose from {', '.join(TASKS)}")
        if self.shots < 0 or self.shots and self.template and self.shot is None:
            raise ValueError(
                f"shots={self.shots} of {self.task}: must not be negative and need a text as shot"
            )

    def build_method(self) -> Method | None:
        from outpace.methods.options import find_method, method_from_options

        if self.method is None:
            return None
        options = dict(self.method)
        return method_from_options(find_method(options.pop("name")), options)

    def request_options(self, overrides: Options) -> Options:
        """Return options of a request: those given, or else those of the paper."""
        from outpace.decoding import Kind
        from outpace.methods import Method

        chosen = {name: value for name, value in overrides.items() if value is not None}
        published = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p")}
        defaults = Options(
            stop=tuple(self.stop), raw=self.raw, template=self.variables, method=self.build_method()
        )
        method = chosen.get("method", defaults["method"])
        if self.canvas and isinstance(method, Method) and Kind.DIFFUSION in method.target_kinds:
            published["max_tokens"] = self.canvas
        return {**published, **defaults, **chosen}  # type: ignore[typeddict-item]

    def load_questions(self, path: str | None, limit: int, shots: str | None) -> list[Question]:
        """Return the first `limit` questions of the task in this setting.

        Args:
            path: File of the task.
            limit: Maximum number of questions.
            shots: File of few-shot examples.
        """
        from outpace.lab.scoring import NEEDED

        if self.template is None:
            raise ValueError(
                f"{self.task} is a task of lm-evaluation-harness only: use --tasks {self.harness}"
            )
        NEEDED.get(self.score, lambda: None)()
        self.check_shots(shots)
        task, first = TASKS[self.task], self.shots if self.held_out else 0
        lines = task.load_lines(path, limit + first)
        is_separate = self.shots and shots is not None
        examples = task.load_lines(shots, self.shots) if is_separate else lines[:first]
        if len(examples) < self.shots or not lines[first:]:
            raise ValueError(
                f"{self.shots} shots and a question need more lines than the {len(lines)} of "
                f"{shots or path}"
            )
        return [
            Question(self.build_prompt(line, examples), task.reference(line), self.score)
            for line in lines[first:]
        ]

    def check_shots(self, shots: str | None) -> None:
        is_self_contained = self.held_out or not self.shots
        if shots is not None and is_self_contained:
            raise ValueError(
                f"--shots: {self.task} has {'its own' if self.held_out else 'no'} shots in this "
                "protocol; omit it, or set their number with --num-shots"
            )
        if shots is None and not is_self_contained:
            raise ValueError(
                f"--shots: {self.task} needs {self.shots} shots in this protocol; set a file, "
                "such as lines of the training split"
            )

    def build_prompt(self, line: JsonRecord, examples: Sequence[JsonRecord]) -> Prompt:
        """Return a line with its examples: text, or messages."""
        assert self.template is not None
        question = fill_template(self.template, line)
        pairs = [
            (fill_template(self.template, e), fill_template(self.shot or "", e)) for e in examples
        ]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        if self.turns:
            texts = [text for pair in pairs for text in pair]
            texts = (
                [self.intro + texts[0], *texts[1:], question] if texts else [self.intro + question]
            )
            roles = ("user", "assistant")
            turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
            return [*system, *turns]
        text = self.intro + self.between.join([*map("".join, pairs), question])
        return [*system, {"role": "user", "content": text}] if system else text


def fill_template(template: str, line: JsonRecord) -> str:

    def field_text(placeholder: re.Match[str]) -> str:
        value = line.get(placeholder[1])
        if isinstance(value, list):
            value = "\n".join(value if placeholder[2] is None else value[int(placeholder[2]) :][:1])
        if not isinstance(value, str):
            raise ValueError(f"a line has no text in field {placeholder[1]} of the template")
        return value

    return TEMPLATE_FIELD.sub(field_text, template)


def load_settings(protocol: str) -> list[Setting]:
    """Return all settings of a protocol, given by name or file."""
    path = PROTOCOL_FOLDER / f"{protocol}.toml" if protocol in PROTOCOLS else Path(protocol)
    if not path.is_file():
        raise ValueError(f"unknown protocol {protocol!r}; choose from {', '.join(PROTOCOLS)}")
    try:
        return list(parse_settings(tomllib.loads(path.read_text("utf-8-sig"))))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid protocol: {error}") from error


def parse_settings(table: Mapping[str, Any]) -> Iterator[Setting]:
    for task, shared in table["tasks"].items():
        common = dict(shared)
        for overrides in common.pop("settings", [{}]):
            values = {**common, **overrides}
            yield read_section(task, Setting, {**values, "task": task})


def find_setting(task: str, protocol: str = "plain") -> Setting:
    """Return the setting of a task in `protocol` or `protocol:name`."""
    protocol, _, name = protocol.partition(":")
    all_settings = load_settings(protocol)
    if task not in TASKS and task not in {each.task for each in all_settings}:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    of_task = {each.name: each for each in all_settings if each.task == task}
    if not of_task:
        names = ", ".join(dict.fromkeys(each.task for each in all_settings))
        raise ValueError(f"{protocol} has no task {task!r}; choose from {names}")
    if not name and len(of_task) == 1:
        return next(iter(of_task.values()))
    if name not in of_task:
        names = ", ".join(f"{protocol}:{each}".removesuffix(":") for each in of_task)
        problem = f"no setting {name!r}" if name else "several settings"
        raise ValueError(f"{protocol} has {problem} of {task}; choose from {names}")
    return of_task[name]
