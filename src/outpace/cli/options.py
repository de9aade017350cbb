"""Fields of a method or of a flag group as flags of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from typer import Option

from outpace.errors import OptionError
from outpace.field_types import Option as Described
from outpace.field_types import list_options
from outpace.methods import AUTO_METHOD, METHODS

if TYPE_CHECKING:
    from outpace.methods import Method


def parse_method(name: str, values: Mapping[str, str]) -> Method:
    """Create a method from option strings, such as those of `ratio=0.5 window=none`.

    Raises:
        OptionError: For an unknown or missing option, or an invalid value.
    """
    from outpace.methods.options import make_method, open_method

    kind = open_method(name)
    return make_method(
        kind, parse_options(kind, values), spelling=lambda option: f"--{flag_name(option)}"
    )


def parse_method_words(text: str) -> Method:
    """Create a method from `NAME option=value …`; raises as `parse_method` does."""
    return parse_method(*split_method_words(text))


def split_method_words(text: str) -> tuple[str, dict[str, str]]:
    """Split `NAME option=value …` into name and options."""
    name, *options = text.split()
    if wrong := [option for option in options if "=" not in option]:
        raise ValueError(f"{wrong[0]!r} is not an option of {name}: write option=value")
    return name, dict(option.split("=", 1) for option in options)


def format_method(method: Method) -> str:
    """Format a method as `NAME option=value …`, without the options that have their default."""
    from outpace.methods.options import method_name

    words = [method_name(type(method))]
    for name, option in list_options(type(method)).items():
        if (value := getattr(method, name)) != option.default:
            words.append(f"{name}={format_value(value)}")
    return " ".join(words)


def format_value(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def parse_options(kind: type[Method], values: Mapping[str, str]) -> dict[str, Any]:
    """Parse option values of a method; values of unknown options stay strings."""
    options = list_options(kind)
    return {
        option: parse_option(kind, option, text) if option in options else text
        for option, text in values.items()
    }


def parse_option(kind: type[Method], option: str, text: str) -> Any:
    """Parse one option value; raises `OptionError` for an invalid one."""
    described = list_options(kind)[option]
    plain, words = described.kind, option_words(described)
    if text.lower() in words:
        return None if text.lower() == "none" else text.lower()
    try:
        if plain is bool:
            return {"true": True, "false": False}[text.lower()]
        return plain(text)
    except (KeyError, ValueError):
        choices = " or ".join([plain.__name__, *words])
        raise OptionError(option, text, f"must be {choices}") from None


def option_words(option: Described) -> list[str]:
    """Return the words that an option accepts, `none` for None included."""
    return [*option.words, *["none"] * option.is_nullable]


def flag_name(option: str) -> str:
    return option.replace("_", "-")


def complete_method(incomplete: str) -> list[str]:
    return [name for name in (AUTO_METHOD, *METHODS) if name.startswith(incomplete)]


def make_method_flag() -> Any:
    names = ", ".join((AUTO_METHOD, *METHODS))
    text = f"Decoding method: {names}; or FILE.py:CLASS, your own."
    return Option("--method", help=text, autocompletion=complete_method)


if TYPE_CHECKING:
    MethodFlag = Method | None
else:
    MethodFlag = Annotated[str | None, make_method_flag()]
    """Annotation of a command's method."""


def add_method_flags(function: Callable[..., None], name: str | None) -> Callable[..., None]:
    """Return a command that builds its `method` from `--method` and the flags of that method."""
    kind = None
    if name not in (None, AUTO_METHOD):
        from outpace.methods.options import open_method

        kind = open_method(name)
    flags = [method_parameter(kind, each) for each in list_options(kind).values()] if kind else []
    parameters = inspect.signature(function, eval_str=True).parameters

    def call_with_method(**arguments: Any) -> None:
        values = {p.name: arguments.pop(p.name) for p in flags}
        method_name = arguments.pop("method")
        texts = {option: text for option, text in values.items() if text is not None}
        method = None if method_name in (None, AUTO_METHOD) else parse_method(method_name, texts)
        function(method=method, **arguments)

    return wrap_command(call_with_method, function, [*parameters.values(), *flags])


def expand_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which each group of flags is expanded into one flag per field."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.default for p in parameters if is_dataclass(p.default)}
    flat = [each for p in parameters for each in (group_parameters(p) if p.name in groups else [p])]

    def call_with_groups(**values: Any) -> None:
        for name, default in groups.items():
            values[name] = type(default)(**{f.name: values.pop(f.name) for f in fields(default)})
        function(**values)

    return wrap_command(call_with_groups, function, flat)


def group_parameters(group: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter for each field of a flag group, with its default in the group."""
    hints = get_type_hints(type(group.default), include_extras=True)
    defaults = {f.name: getattr(group.default, f.name) for f in fields(group.default)}
    return [
        group.replace(name=name, default=value, annotation=annotate_default(hints[name], value))
        for name, value in defaults.items()
    ]


def annotate_default(hint: Any, default: object) -> Any:
    """Return the annotation of a flag; a default of the group replaces the default in words."""
    kind, flagged = get_args(hint)
    if default is not None and isinstance(flagged.show_default, str):
        flagged = copy(flagged)
        flagged.show_default = True
    return Annotated[kind, flagged]


def wrap_command(
    command: Callable[..., None],
    function: Callable[..., None],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """Give `command` the name and docstring of `function`, and new parameters."""
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def method_parameter(kind: type[Method], described: Described) -> inspect.Parameter:
    flagged = Option(
        f"--{flag_name(described.name)}",
        metavar=described.kind.__name__.upper(),
        help=describe_option(described),
        rich_help_panel=f"Options of {kind.__name__}",
    )
    return inspect.Parameter(
        described.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, flagged],
    )


def describe_option(described: Described) -> str:
    """Describe an option: meaning, accepted values and default."""
    plain, words = described.kind, option_words(described)
    choices = " or ".join(words if plain is str and words else [plain.__name__, *words])
    default = "required" if described.is_required else f"default {described.default}".lower()
    return "; ".join(filter(None, (described.text, choices, default)))
