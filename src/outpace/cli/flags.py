"""Flags that several commands have, and what becomes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

import torch
from typer import Argument, Option

from outpace.api.declared import Declared, declared
from outpace.api.llm import LLM
from outpace.api.loading import LoadOptions
from outpace.api.options import REQUEST, Options, RequestOptions
from outpace.api.text import Message, Prompt
from outpace.checkpoints.load import load_config, zoo_names
from outpace.checkpoints.progress import told
from outpace.cli.terminal import check_input, waiting
from outpace.engine.pairing import check_fit
from outpace.errors import OptionError
from outpace.methods import Method
from outpace.methods.options import Named
from outpace.models.device import resolve_device


def like(incomplete: str) -> list[str]:
    """Models of the zoo whose names begin so."""
    return [name for name in zoo_names() if name.startswith(incomplete)]


ModelName = Annotated[
    str, Argument(help="Folder, GGUF file, hub name, or model of the zoo.", autocompletion=like)
]
System = Annotated[str | None, Option(help="System prompt.")]
NoPrefixCache = Annotated[
    bool, Option("--no-prefix-cache", help="Compute anew what prompts that begin alike share.")
]
Limit = Annotated[int, Option(help="Number of problems.")]
Batch = Annotated[int, Option(help="Requests that run at a time.")]
JsonPath = Annotated[Path | None, Option("--json", help="Write the figures here.")]

ClozeText = Annotated[str | None, Option("--fill", help="Text with holes: {{8}}, {{..8}}.")]

SMALL, LARGE = 20_000_000, 2**28
"""Parameters below which one thread is fastest, since more only wait for each other; bytes of a
model from which on it is said how much has come."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Flags that commands take together; they follow from the declarations of their options."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def changed(self, **values: Any) -> Self:
        """The same flags with other values of some."""
        return type(self)(**{**vars(self), **values})


def describe_flag(option: Declared) -> Any:
    """Name, help and shown default of the flag of an option."""
    info = option.info
    name = f"--{info.flag or option.name.replace('_', '-')}"
    usual: Any = True if info.usual is None else info.usual
    return Option(name, help=info.help, metavar=info.metavar, show_default=usual)


def flag(option: Declared) -> Any:
    """The annotation of the flag of an option, which is None where it is not given."""
    kind = option.info.typed or option.plain
    kind = kind if kind is bool or option.info.shows else kind | None
    return Annotated[kind, describe_flag(option)]


def default(option: Declared) -> Any:
    """What a flag is where it is not given."""
    return option.default if option.kind is bool or option.info.shows else None


def flags(kind: type, group: str) -> Callable[[type[Group]], Any]:
    """Give a class a flag for each option of `kind` that is of a group."""
    options = [option for option in declared(kind).values() if option.info.group == group]

    def build(base: type[Group]) -> Any:
        members = [(each.name, flag(each), field(default=default(each))) for each in options]
        made = make_dataclass(base.__name__, members, bases=(base,), frozen=True, kw_only=True)
        made.__doc__, made.__module__ = base.__doc__, base.__module__
        return made

    return build


MaxTokens = Annotated[int | None, describe_flag(REQUEST["max_tokens"])]
Temperature = Annotated[float | None, describe_flag(REQUEST["temperature"])]
Seed = Annotated[int, describe_flag(REQUEST["seed"])]
Template = Annotated[list[str] | None, describe_flag(REQUEST["template"])]
Raw = Annotated[bool, describe_flag(REQUEST["raw"])]
Logprobs = Annotated[bool, describe_flag(REQUEST["logprobs"])]


def given(group: Any) -> Options:
    """The flags of a group that were given, as a request takes them."""
    known = asdict(group).items()
    return cast(Options, {k: v for k, v in known if v is not None and v is not False and v != []})


@flags(RequestOptions, "sampling")
class Choice(Group):
    """How tokens are chosen, and how many."""

    def options(self) -> Options:
        """As a request takes them."""
        options = given(self)
        if self.logit_bias:
            options["logit_bias"] = dict(map(bias, self.logit_bias))
        return options


@flags(RequestOptions, "ending")
class Ending(Group):
    """When an answer ends."""

    def options(self) -> Options:
        """As a request takes them."""
        return given(self)


@dataclass(frozen=True, kw_only=True)
class Dressing:
    """What stands around a prompt."""

    system: System = None
    template: Template = None

    def options(self) -> Options:
        """As a request takes them."""
        return Options(template=dict(map(variable, self.template or ())))

    def messages(self, llm: LLM) -> list[Message]:
        """The system prompt as the first message, where there is one.

        Raises `ValueError` where the chat template of the model leaves it out.
        """
        if self.system is None:
            return []
        first = [{"role": "system", "content": self.system}]
        asked = [*first, {"role": "user", "content": "-"}]
        if llm.text.tokenizer is not None and self.system.strip() not in llm.text.render(asked, {}):
            raise OptionError(
                "system",
                self.system,
                f"--system {self.system!r}: the chat template of {llm.name} leaves system prompts "
                "out; put it into the prompt",
            )
        return first

    def prompt(self, llm: LLM, text: str, *, raw: bool = False) -> Prompt:
        """A text as it is asked."""
        if self.system is None:
            return text
        if raw:
            message = "--system needs the chat template: give it or --raw"
            raise OptionError("system", self.system, message)
        return [*self.messages(llm), {"role": "user", "content": text}]


@flags(RequestOptions, "rule")
class Rule(Group):
    """What the whole answer must be."""

    def options(self) -> Options:
        """As a request takes them. Raises `ValueError` for a file that is no JSON, or no text."""
        schema = None if self.schema is None else read_json(self.schema)
        grammar = None if self.grammar is None else read_text(self.grammar, "grammar")
        return Options(
            schema=schema, regex=self.regex, choices=self.choices or None, grammar=grammar
        )


def bias(text: str) -> tuple[int, float]:
    """Token id and number of a bias."""
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        message = f"--logit-bias takes TOKEN=NUMBER, such as 13=-2.5, not {text!r}"
        raise OptionError("logit_bias", text, message) from None


WORDS = {"true": True, "false": False, "none": None, "null": None}


def variable(text: str) -> tuple[str, Any]:
    """Name and value of a variable: a truth value, a number or whatever JSON says, else text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        message = f"--template takes NAME=VALUE, such as enable_thinking=false, not {text!r}"
        raise OptionError("template", text, message)
    if value.lower() in WORDS:
        return name, WORDS[value.lower()]
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def typed(prompt: str) -> str:
    """A prompt; `-` stands for what comes on standard input, but for the end of its last line."""
    if prompt != "-":
        return prompt
    check_input()
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        message = f"prompt: standard input is not UTF-8: {error}"
        raise OptionError("prompt", None, message) from error


def read_text(path: Path, option: str) -> str:
    """What the file of an option holds; `OptionError` where there is none, or no text in it."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        message = f"--{option} {path} is no file of text: {error}"
        raise OptionError(option, path, message) from error


def read_json(path: Path) -> Any:
    """What the file of a schema holds; `ValueError` where that is no JSON."""
    text = read_text(path, "schema")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"--schema {path} is no readable JSON: {error}"
        raise OptionError("schema", path, message) from error


@flags(LoadOptions, "loading")
class Loading(Group):
    """What is merged into a model, in which numbers and where it runs."""

    def open(self, model: str, method: Named | None, **options: Any) -> LLM:
        """A model ready to decode, with further `options` of an `LLM`."""
        with waiting(f"loading {model}") as say, told(partial(loaded, say)):
            if one_thread(model, self.device):
                torch.set_num_threads(1)  # before layouts are tried
            return LLM(model, method, **options, **asdict(self))

    def check(self, pairs: Iterable[tuple[str, Named | None]]) -> None:
        """Raise `ValueError` for a method that does not decode its model; nothing is loaded."""
        for model, method in pairs:
            check_fit(model, method, max_length=self.max_length, mask_id=self.mask_id)

    def open_all(self, pairs: Iterable[tuple[str, Method]]) -> dict[str, LLM]:
        """Models by name, each once, that pair with all of their methods."""
        llms: dict[str, LLM] = {}
        pairs = list(pairs)
        self.check(pairs)
        if self.tensor_parallel > 1 and len({model for model, _ in pairs}) > 1:
            message = "--tensor-parallel splits one model: name no further ones"
            raise OptionError("tensor_parallel", self.tensor_parallel, message)
        for model, method in pairs:
            if model not in llms:
                # What one method has computed for a prompt must not help the next.
                llms[model] = self.open(model, method, prefix_cache=False)
            llms[model].pair(method)
        return llms


def loaded(say: Callable[[str], None], done: int, total: int) -> None:
    """Say how much of a model has come, where that takes a while."""
    if total >= LARGE:
        say(f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB")


def one_thread(model: str, device: str | None) -> bool:
    """Whether a model decodes fastest on one thread; `ValueError` for no model and no device."""
    return resolve_device(device).type == "cpu" and load_config(model).parameters < SMALL


CHOICE = Choice()
DRESSING = Dressing()
ENDING = Ending()
LOADING = Loading()
RULE = Rule()
