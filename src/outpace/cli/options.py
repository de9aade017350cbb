"""Fields as flags of a command: of a method (`--method x --help` shows those of x), of a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

from outpace.benchmark.entry import Entry, swept, word
from outpace.errors import OptionError
from outpace.methods import METHODS, Method
from outpace.methods.options import Option as Described
from outpace.methods.options import find_method, make_method, options_of


def parse_method(name: str, values: Mapping[str, str]) -> Method:
    """A method from texts, such as those of `ratio=0.5 window=none`.

    Raises `ValueError` for an unknown option, a missing one, or a value of another type.
    """
    return make_method(name, parsed(name, values), spelling=lambda option: f"--{flag(option)}")


def parse_words(text: str) -> Method:
    """A method from `NAME option=value …`; raises as `parse_method` does."""
    return parse_method(*split_words(text))


def split_words(text: str) -> tuple[str, dict[str, str]]:
    """Name and options of a method, as texts."""
    name, *options = text.split()
    if wrong := [option for option in options if "=" not in option]:
        raise ValueError(f"{wrong[0]!r} is no option of {name}: write option=value")
    return name, dict(option.split("=", 1) for option in options)


def split_entry(text: str) -> tuple[str, str, dict[str, str]]:
    """Model, method and options of an entry, as texts."""
    model, _, method = text.strip().partition(" ")
    if not method:
        raise ValueError(f"{text!r} is no entry: write 'MODEL METHOD option=value …'")
    return model, *split_words(method)


def parse_entries(text: str) -> list[Entry]:
    """Entries from `MODEL METHOD option=value …`, where commas part the values of a sweep."""
    model, name, options = split_entry(text)
    values = {o: [parsed(name, {o: each})[o] for each in t.split(",")] for o, t in options.items()}
    return swept(model, name, values)


def texts_of(method: Method) -> tuple[str, dict[str, str]]:
    """Name and options of a method as texts, without the options that it has anyway."""
    name = next(name for name, kind in METHODS.items() if kind is type(method))
    values = {o.name: (getattr(method, o.name), o) for o in options_of(type(method)).values()}
    return name, {n: word(value) for n, (value, o) in values.items() if value != o.default}


def flags_of(method: Method) -> list[str]:
    """A method as words of a command line."""
    name, texts = texts_of(method)
    flags = ((f"--{flag(option)}", text) for option, text in texts.items())
    return ["--method", name, *(word for pair in flags for word in pair)]


def entry_of(model: str, method: Method) -> str:
    """Model and method as `MODEL METHOD option=value …`, which `split_entry` takes."""
    return f"{model} {words_for(method)}"


def words_for(method: Method) -> str:
    """Write a method as `NAME option=value …`, which `split_words` takes."""
    name, texts = texts_of(method)
    return " ".join([name, *(f"{option}={text}" for option, text in texts.items())])


def requested_method(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    """A method as a request to a server names it, with the options that are given.

    What is missing is the server's to say.
    """
    return {"method": name, "options": parsed(name, values)}


def parsed(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    """Options of a method from texts; what it does not have stays as it is."""
    kind = find_method(name)
    known = options_of(kind)
    return {
        option: parse(kind, option, text) if option in known else text
        for option, text in values.items()
    }


def parse(kind: type[Method], option: str, text: str) -> Any:
    """One value from its text."""
    described = options_of(kind)[option]
    plain, words = described.kind, words_of(described)
    if text.lower() in words:
        return None if text.lower() == "none" else text.lower()
    try:
        if plain is bool:
            return {"true": True, "false": False}[text.lower()]
        return plain(text)
    except (KeyError, ValueError):
        choices = " or ".join([plain.__name__, *words])
        message = f"{flag(option)} takes {choices}, not {text!r}"
        raise OptionError(option, text, message) from None


def words_of(option: Described) -> list[str]:
    """Words that an option may be, `none` for None."""
    return [*option.words, *["none"] * option.nullable]


def flag(option: str) -> str:
    """Name of an option on the command line."""
    return option.replace("_", "-")


def like(incomplete: str) -> list[str]:
    """Methods whose names begin so."""
    return [name for name in METHODS if name.startswith(incomplete)]


NAME = Annotated[str | None, Option("--method", help=f"{', '.join(METHODS)}.", autocompletion=like)]


def with_method(function: Callable[..., None], name: str | None) -> Callable[..., None]:
    """A command whose parameter `method` is made of `--method` and the flags of that method.

    One that wants no `Method` gets what a request to a server says of it.
    """
    kind = None if name is None else find_method(name)
    own = [parameter(kind, each) for each in options_of(kind).values()] if kind else []
    known = inspect.signature(function, eval_str=True).parameters
    wants = get_args(known["method"].annotation)
    make: Callable[..., Any] = parse_method if Method in wants else requested_method
    shared = [p.replace(annotation=NAME) if p.name == "method" else p for p in known.values()]

    def command(**given: Any) -> None:
        values = {p.name: given.pop(p.name) for p in own}
        chosen = given.pop("method")
        texts = {option: text for option, text in values.items() if text is not None}
        method = None if chosen is None else make(chosen, texts)
        function(method=method, **given)

    return dressed(command, function, [*shared, *own])


def given(group: Any) -> list[str]:
    """A group of flags as words of a command line, without those that it has anyway."""
    values = {f.name: (getattr(group, f.name), f.default) for f in fields(group)}
    told = {flag(name): word(value) for name, (value, usual) in values.items() if value != usual}
    return [text for name, value in told.items() for text in (f"--{name}", value)]


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are groups of flags became a flag for each field."""
    known = inspect.signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.default for p in known if is_dataclass(p.default)}
    flat = [each for p in known for each in (members(p) if p.name in groups else [p])]

    def command(**given: Any) -> None:
        for name, usual in groups.items():
            given[name] = type(usual)(**{f.name: given.pop(f.name) for f in fields(usual)})
        function(**given)

    return dressed(command, function, flat)


def members(group: inspect.Parameter) -> list[inspect.Parameter]:
    """A flag for each field of a group, with what its default has there."""
    hints = get_type_hints(type(group.default), include_extras=True)
    usual = {f.name: getattr(group.default, f.name) for f in fields(group.default)}
    return [
        group.replace(name=name, default=value, annotation=shown(hints[name], value))
        for name, value in usual.items()
    ]


def shown(hint: Any, usual: object) -> Any:
    """The annotation of a flag, whose default in words gives way to one that its group has."""
    kind, flagged = get_args(hint)
    if usual is not None and isinstance(flagged.show_default, str):
        flagged = copy(flagged)
        flagged.show_default = True
    return Annotated[kind, flagged]


def dressed(
    command: Callable[..., None],
    function: Callable[..., None],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """A command under the name of the function that it calls, with parameters of its own."""
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def parameter(kind: type[Method], described: Described) -> inspect.Parameter:
    """An option of a method as a flag."""
    flagged = Option(
        f"--{flag(described.name)}",
        metavar=described.kind.__name__.upper(),
        help=about(described),
        rich_help_panel=f"Options of {kind.__name__}",
    )
    return inspect.Parameter(
        described.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, flagged],
    )


def about(described: Described) -> str:
    """What an option may be, and what it is where it is not given."""
    plain, words = described.kind, words_of(described)
    choices = " or ".join(words if plain is str and words else [plain.__name__, *words])
    default = "needed" if described.needed else f"by default {described.default}".lower()
    return "; ".join(filter(None, (described.meaning, choices, default)))
