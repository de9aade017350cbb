"""Flags shared by several commands, and the options built from them."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

from rich.console import Console
from typer import Argument, Option

from outpace.api.loading import LoadOptions
from outpace.api.options import (
    REQUEST_OPTIONS,
    Options,
    RequestOptions,
    describe_default,
    option_info,
    options_of_group,
)
from outpace.cli.pull import fetch_model
from outpace.cli.terminal import check_standard_input, error_console, show_spinner
from outpace.errors import OptionError
from outpace.field_types import Option as DeclaredOption

if TYPE_CHECKING:
    from outpace.api.chat_template import Message
    from outpace.api.llm import LLM
    from outpace.api.text import Prompt
    from outpace.methods import Method
    from outpace.methods.options import MethodSpec


def complete_model(incomplete: str) -> list[str]:
    from outpace.checkpoints.hub import zoo_names

    return [name for name in zoo_names() if name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    Argument(
        help="Folder, GGUF file, hub name (ORG/REPO:QUANT), or embedded model.",
        autocompletion=complete_model,
    ),
]
SystemFlag = Annotated[str | None, Option(help="System prompt.")]
NoPrefixCacheFlag = Annotated[bool, Option("--no-prefix-cache", help="Disable the prefix cache.")]
LimitFlag = Annotated[int, Option(help="Number of problems.")]
BatchFlag = Annotated[int, Option(help="Number of concurrent requests.")]
JsonFlag = Annotated[Path | None, Option("--json", help="Write the figures to this file, as JSON.")]

PROMPT_FILE_HELP = "File of prompts: JSON lines, or .txt with one per line"

FillFlag = Annotated[
    str | None, Option("--fill", help="Text with holes to fill, such as {{8}} or {{..8}}.")
]

MAX_SINGLE_THREAD_PARAMETERS = 20_000_000
"""Number of parameters below which one thread is fastest, since more mostly synchronize."""

MIN_PROGRESS_BYTES = 2**28
"""Size in bytes from which loading a model reports its progress."""


@dataclass(frozen=True, kw_only=True)
class FlagGroup:
    """Flags that several commands share, generated from declared options."""

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def with_values(self, **values: Any) -> Self:
        return type(self)(**{**vars(self), **values})


def describe_flag(option: DeclaredOption) -> Any:
    info = option_info(option)
    name = f"--{info.flag or option.name.replace('_', '-')}"
    return Option(
        name,
        help=info.help or option.summary,
        metavar=info.metavar,
        show_default=describe_default(option) or True,
    )


def flag_annotation(option: DeclaredOption) -> Any:
    """Return the annotation of an option's flag; a flag that is not set is None."""
    info = option_info(option)
    kind = info.typed or option.kind
    kind = kind if kind is bool or info.shows else kind | None
    return Annotated[kind, describe_flag(option)]


def flag_default(option: DeclaredOption) -> Any:
    return option.default if option.kind is bool or option_info(option).shows else None


GroupClass = TypeVar("GroupClass", bound=FlagGroup)


def add_flags(kind: type, group: str) -> Callable[[type[GroupClass]], type[GroupClass]]:
    """Return a class decorator that adds a flag for each option of `kind` in a group."""
    options = options_of_group(kind, group)

    def make_class(base: type[GroupClass]) -> type[GroupClass]:
        members = [
            (each.name, flag_annotation(each), field(default=flag_default(each)))
            for each in options
        ]
        new: Any = make_dataclass(base.__name__, members, bases=(base,), frozen=True, kw_only=True)
        new.__doc__, new.__module__ = base.__doc__, base.__module__
        return cast(type[GroupClass], new)

    return make_class


MaxTokensFlag = Annotated[int | None, describe_flag(REQUEST_OPTIONS["max_tokens"])]
TemperatureFlag = Annotated[float | None, describe_flag(REQUEST_OPTIONS["temperature"])]
SeedFlag = Annotated[int, describe_flag(REQUEST_OPTIONS["seed"])]
TemplateFlag = Annotated[list[str] | None, describe_flag(REQUEST_OPTIONS["template"])]
EffortFlag = Annotated[str | None, describe_flag(REQUEST_OPTIONS["reasoning_effort"])]
RawFlag = Annotated[bool, describe_flag(REQUEST_OPTIONS["raw"])]
LogprobsFlag = Annotated[bool, describe_flag(REQUEST_OPTIONS["logprobs"])]


def collect_options(group: Any) -> Options:
    """Return the flags of a group that are set, as options of a request."""
    values = asdict(group).items()
    return cast(Options, {k: v for k, v in values if v is not None and v is not False and v != []})


@add_flags(RequestOptions, "sampling")
class SamplingFlags(FlagGroup):
    """Flags of sampling and length."""

    def options(self) -> Options:
        options = collect_options(self)
        if self.logit_bias:
            options["logit_bias"] = dict(map(parse_bias, self.logit_bias))
        return options


@add_flags(RequestOptions, "ending")
class StopFlags(FlagGroup):
    """Flags of what ends an answer."""

    def options(self) -> Options:
        return collect_options(self)


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """Flags of the system prompt and the chat template."""

    system: SystemFlag = None
    template: TemplateFlag = None
    reasoning_effort: EffortFlag = None

    def options(self) -> Options:
        options = Options(template=dict(map(parse_variable, self.template or ())))
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        return options

    def system_messages(self, llm: LLM) -> list[Message]:
        """Return the system prompt as a list of messages, empty if there is none.

        Raises:
            OptionError: If the chat template of the model ignores system prompts.
        """
        if self.system is None:
            return []
        first = [{"role": "system", "content": self.system}]
        probe = [*first, {"role": "user", "content": "-"}]
        if llm.text.tokenizer is not None and self.system.strip() not in llm.text.render_chat(
            probe, {}
        ):
            raise OptionError(
                "system",
                self.system,
                f"the chat template of {llm.name} ignores it: put it into the prompt",
            )
        return first

    def build_prompt(self, llm: LLM, text: str, *, raw: bool = False) -> Prompt:
        if self.system is None:
            return text
        if raw:
            raise OptionError(
                "system", self.system, "needs the chat template and cannot be combined with --raw"
            )
        return [*self.system_messages(llm), {"role": "user", "content": text}]


@add_flags(RequestOptions, "rule")
class ConstraintFlags(FlagGroup):
    """Flags of the constraint on the whole answer."""

    def options(self) -> Options:
        """Return the options of a request; raises `OptionError` for an unreadable file."""
        schema = None if self.schema is None else read_schema_file(self.schema)
        grammar = None if self.grammar is None else read_option_file(self.grammar, "--grammar")
        return Options(
            schema=schema, regex=self.regex, choices=self.choices or None, grammar=grammar
        )


def parse_bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise OptionError("logit_bias", text, "must be TOKEN=NUMBER, such as 13=-2.5") from None


LITERALS = {"true": True, "false": False, "none": None, "null": None}
"""Values of template variables other than JSON."""


def parse_variable(text: str) -> tuple[str, Any]:
    """Parse a variable: a Boolean, None or any JSON value, otherwise text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise OptionError("template", text, "must be NAME=VALUE, such as enable_thinking=false")
    if value.lower() in LITERALS:
        return name, LITERALS[value.lower()]
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def read_prompt(prompt: str) -> str:
    """Return a prompt; `-` reads standard input, without byte order mark and last newline."""
    if prompt != "-":
        return prompt
    check_standard_input()
    try:
        return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError("prompt", None, f"standard input is not UTF-8: {error}") from error


def read_option_file(path: Path, option: str) -> str:
    """Read the file of an option; raises `OptionError` if it is missing or not text."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise OptionError(option, path, f"{path} cannot be read as text: {error}") from error


def read_schema_file(path: Path) -> Any:
    """Read a schema; raises `OptionError` if it is not JSON."""
    text = read_option_file(path, "--schema")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError("schema", path, f"{path} is not valid JSON: {error}") from error


@add_flags(LoadOptions, "loading")
class LoadFlags(FlagGroup):
    """Flags of the model's adapter, number format and device."""

    def open_model(
        self,
        model: str,
        method: MethodSpec | None,
        *,
        notes: Console = error_console,
        **options: Any,
    ) -> LLM:
        """Load a model with these flags and further `options` of an `LLM`.

        Without a method, `notes` names a draft that decodes the model or could.
        """
        import torch

        from outpace.api.llm import LLM
        from outpace.checkpoints.hub import report_load_progress

        fetch_model(model)
        with (
            show_spinner(f"loading {model}") as report,
            report_load_progress(partial(report_progress, report)),
        ):
            if uses_one_thread(model, self.device):
                torch.set_num_threads(1)  # before layouts are tried
            llm = LLM(model, method, **options, **asdict(self))
        if not gc.isenabled():  # until a model is loaded
            gc.freeze()
            gc.enable()
        if method is None and (line := describe_draft(llm)) is not None:
            notes.print(line, style="dim", soft_wrap=True)
        return llm

    def check_methods(self, pairs: Iterable[tuple[str, MethodSpec | None]]) -> None:
        """Raise `ValueError` for a method that does not support its model, without loading it."""
        from outpace.engine.pairing import MethodSelector

        for model, method in pairs:
            fetch_model(model)
            sizes = {"max_length": self.max_length, "mask_id": self.mask_id}
            opened = MethodSelector.open(model, method, **sizes, adapter=self.adapter)
            opened.open_models(opened.default)

    def open_models(self, pairs: Iterable[tuple[str, Method]]) -> dict[str, LLM]:
        """Load each model once, and pair it with all of its methods; returns models by name."""
        llms: dict[str, LLM] = {}
        pairs = list(pairs)
        self.check_methods(pairs)
        if self.tensor_parallel > 1 and len({model for model, _ in pairs}) > 1:
            raise OptionError("tensor_parallel", self.tensor_parallel, "needs a single model")
        for model, method in pairs:
            if model not in llms:
                # No method may profit from the prompt cache of another.
                llms[model] = self.open_model(model, method, prefix_cache=False)
            llms[model].pair(method)
        return llms


def describe_draft(llm: LLM) -> str | None:
    """Return the line on the draft that decodes the model or could; None without one."""
    draft = llm.methods.draft
    return None if draft is None else draft.describe(llm.name)


def report_progress(report: Callable[[str], None], done: int, total: int) -> None:
    if total >= MIN_PROGRESS_BYTES:
        report(f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB")


def uses_one_thread(model: str, device: str | None) -> bool:
    """Return whether one thread is fastest; raises `ValueError` for a bad model or device."""
    from outpace.checkpoints.load import load_config
    from outpace.models.device import resolve_device

    return (
        resolve_device(device).type == "cpu"
        and load_config(model).num_parameters < MAX_SINGLE_THREAD_PARAMETERS
    )


SAMPLING_FLAGS = SamplingFlags()
PROMPT_FLAGS = PromptFlags()
STOP_FLAGS = StopFlags()
LOAD_FLAGS = LoadFlags()
CONSTRAINT_FLAGS = ConstraintFlags()
