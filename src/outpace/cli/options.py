"""Fields as flags of a command: of a method (`--method x --help` shows those of x), of a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

from typer import Option

from outpace.benchmark.entry import Entry, swept, word
from outpace.methods import METHODS, Method
from outpace.methods.options import Option as Described
from outpace.methods.options import find_method, options_of


def parse_method(name: str, values: Mapping[str, str]) -> Method:
    """A method from texts, such as those of `ratio=0.5 window=none`.

    Raises `ValueError` for an unknown option, a missing one, or a value of another type.
    """
    kind = with_options(name, values)
    return kind(**{option: parse(kind, option, text) for option, text in values.items()})


def with_options(name: str, given: Collection[str]) -> type[Method]:
    """A method that has these options and needs no other; `ValueError` for none such."""
    kind = find_method(name)
    known = options_of(kind)
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(
            f"{name} has no option {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    needed = {option.name for option in known.values() if option.needed}
    if missing := sorted(needed - set(given)):
        raise ValueError(f"{name} needs {', '.join(f'--{flag(option)}' for option in missing)}")
    return kind


def parse_entries(text: str) -> list[Entry]:
    """Entries from `MODEL METHOD option=value …`, where commas part the values of a sweep."""
    model, name, options = split_entry(text)
    kind = with_options(name, options)
    values = {o: [parse(kind, o, each) for each in t.split(",")] for o, t in options.items()}
    return swept(model, name, values)


def split_entry(text: str) -> tuple[str, str, dict[str, str]]:
    """Model, method and options of an entry, as texts."""
    model, *rest = text.split()
    if not rest or not all("=" in option for option in rest[1:]):
        raise ValueError(f"{text!r} is no entry: write 'MODEL METHOD option=value …'")
    return model, rest[0], dict(option.split("=", 1) for option in rest[1:])


def flags_of(method: Method) -> list[str]:
    """A method as words of a command line, without the options that it has anyway."""
    name = next(name for name, kind in METHODS.items() if kind is type(method))
    words = ["--method", name]
    for option in options_of(type(method)).values():
        if (value := getattr(method, option.name)) != option.default:
            words += [f"--{flag(option.name)}", word(value)]
    return words


def requested_method(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    """A method as a request to a server names it, with the options that are given.

    What is missing is the server's to say.
    """
    kind = find_method(name)
    options = {option: parse(kind, option, text) for option, text in values.items()}
    return {"method": name, "options": options}


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
        raise ValueError(f"{flag(option)} takes {choices}, not {text!r}") from None


def words_of(option: Described) -> list[str]:
    """Words that an option may be, `none` for None."""
    return [*option.words, *["none"] * option.nullable]


def flag(option: str) -> str:
    """Name of an option on the command line."""
    return option.replace("_", "-")


def named(args: Sequence[str]) -> str | None:
    """Value of `--method` in a list of arguments."""
    for arg, after in zip(args, [*args[1:], None], strict=True):
        if arg.startswith("--method="):
            return arg.partition("=")[2]
        if arg == "--method":
            return after
    return None


def with_method(
    function: Callable[..., None],
    name: str | None,
    make: Callable[[str, Mapping[str, str]], Any] = parse_method,
) -> Callable[..., None]:
    """A command whose parameter `method` is made of `--method` and the flags of that method."""
    kind = None if name is None else find_method(name)
    own = [parameter(kind, each) for each in options_of(kind).values()] if kind else []
    known = inspect.signature(function, eval_str=True).parameters.values()
    choice = Annotated[str | None, Option("--method", help=f"{', '.join(METHODS)}.")]
    shared = [p.replace(annotation=choice) if p.name == "method" else p for p in known]

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
    return [
        group.replace(name=f.name, default=getattr(group.default, f.name), annotation=hints[f.name])
        for f in fields(group.default)
    ]


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
    plain, words = described.kind, words_of(described)
    choices = " or ".join(words if plain is str and words else [plain.__name__, *words])
    default = "needed" if described.needed else f"by default {described.default}"
    flagged = Option(
        f"--{flag(described.name)}",
        metavar=plain.__name__.upper(),
        help="; ".join(filter(None, (described.meaning, choices, default.lower()))),
        rich_help_panel=f"Options of {kind.__name__}",
    )
    return inspect.Parameter(
        described.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, flagged],
    )
