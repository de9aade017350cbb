"""The models of a server, and the methods that requests may choose on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

from outpace.api.engine_client import ModelClient
from outpace.api.llm import LLM
from outpace.api.text import Text
from outpace.checkpoints.load import load_config, target_config
from outpace.engine.pairing import check_models, native
from outpace.errors import OptionError, prefixed
from outpace.methods import METHODS, Method
from outpace.methods.options import Option, find_method, options_of
from outpace.models.config import ModelConfig
from outpace.server.fault import Fault
from outpace.server.fields import fields_of
from outpace.server.logs import log_loading
from outpace.server.settings import Entry, name_in

LARGEST = 1000.0
"""Most that an option may be that is no whole number."""

FINEST = 16
"""Most that an option may be that counts something, for each token of the longest text."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An option of a method, and what a request may give it."""

    option: Option
    default: Any
    words: tuple[str, ...]
    bounds: tuple[float, float] | None = None

    def check(self, value: Any) -> None:
        """Raise `Fault` for a value that the operator does not allow, whatever the method says."""
        match value:
            case str():
                allowed = value in self.words
            case bool() | None:
                allowed = True  # the method itself knows
            case _:
                allowed = self.bounds is not None and self.bounds[0] <= value <= self.bounds[1]
        if not allowed and value != self.default:
            told = list(self.words) or ["true", "false"] * (self.option.kind is bool)
            if self.bounds is not None:
                told.append("a number from {:g} to {:g}".format(*self.bounds))
            param = f"outpace.options.{self.option.name}"
            raise Fault(400, f"{param}: must be {' or '.join(told)}, not {value!r}", param=param)

    def described(self) -> dict[str, Any]:
        """As `GET /v1/models` tells it."""
        return {
            "name": self.option.name,
            "help": self.option.meaning,
            "type": self.option.kind.__name__,
            "nullable": self.option.nullable,
            "choices": list(self.words) or None,
            "default": self.default,
            "minimum": self.bounds and self.bounds[0],
            "maximum": self.bounds and self.bounds[1],
        }


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A method that requests may choose on a model.

    `paths` says where the models are that its options name.
    """

    name: str
    kind: type[Method]
    settings: Mapping[str, Setting]
    paths: Mapping[str, str]

    def make(self, given: Mapping[str, Any]) -> tuple[Method, Method]:
        """The method as a client may see it, and with the paths of its models.

        Raises `Fault` for what is no option of it, or no value of that option.
        """
        for name, value in given.items():
            if name not in self.settings:
                known = ", ".join(self.settings) or "none"
                param = f"outpace.options.{name}"
                message = f"{param}: {self.name} has no such option; it has {known}"
                raise Fault(400, message, param=param)
            self.settings[name].check(value)
        return self.made(given) if given else self.usual

    @cached_property
    def usual(self) -> tuple[Method, Method]:
        """The method as it is where a request gives no options."""
        return self.made({})

    def made(self, given: Mapping[str, Any]) -> tuple[Method, Method]:
        """The method with options that are allowed; `Fault` where they do not fit together."""
        values = {name: each.default for name, each in self.settings.items()} | dict(given)
        try:
            shown = self.kind(**values)
        except OptionError as error:
            param = f"outpace.options.{error.param}"
            raise Fault(400, str(error.renamed(param)), param=param) from None
        except ValueError as error:
            param = "outpace.options"
            raise Fault(400, f"{param}: {error}", param=param) from None
        paths = {role: self.paths[values[role]] for role in self.kind.roles}
        return shown, self.kind(**values | paths)

    def described(self, default: bool) -> dict[str, Any]:
        """As `GET /v1/models` tells it."""
        shown, _ = self.make({})
        supported = fields_of(shown)
        return {
            "about": (self.kind.__doc__ or "").splitlines()[0],
            "default": default,
            "options": [each.described() for each in self.settings.values()],
            "fields": supported,
            "provisional": "outpace.provisional" in supported,
        }


@dataclass(kw_only=True)
class Known:
    """What a server must know of a model, wherever it is loaded.

    Attributes:
        place: where it is.
        methods: what requests may choose, by name; `method` is the one that they need not name.
        roles: what each runner is: the target, or what the methods take it for.
    """

    place: str
    config: ModelConfig
    methods: dict[str, Choice]
    method: str
    roles: dict[str, str]


@dataclass(kw_only=True)
class Model(Known):
    """A model that clients may name, and what decodes it."""

    name: str
    entry: Entry
    engine: ModelClient
    text: Text

    def __post_init__(self) -> None:
        decode = self.text.decode
        self.token = cache(lambda token: decode([token]))
        """Text of one token."""
        tokenizer = self.text.tokenizer
        longest = None if tokenizer is None else max(map(len, tokenizer.get_vocab()))
        self.characters = longest and longest * self.config.max_length
        """More characters than any prompt may have, since no token has so many; None if unknown."""

    def choice(self, name: str | None) -> Choice:
        """A method by its name; `Fault` for one that requests may not choose here."""
        name = name or self.method
        if name not in self.methods:
            raise Fault(
                400,
                f"outpace.method: {self.name} is not decoded by {name!r} here; "
                f"choose one of {', '.join(self.methods)}",
                param="outpace.method",
            )
        return self.methods[name]

    def public(self, message: str) -> str:
        """A message with names in place of the paths of models."""
        further = {path: name for name, path in self.entry.further.items()}
        names = further | dict.fromkeys((self.place, self.entry.path), self.name)
        for path in sorted(names, key=len, reverse=True):  # since one may begin like another
            message = message.replace(path, names[path])
        return message

    def described(self, created: int) -> dict[str, Any]:
        """As `GET /v1/models` tells it."""
        config = self.config
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "outpace",
            "outpace": {
                "kind": config.kind.value,
                "family": config.family,
                "max_length": config.max_length,
                "max_tokens": self.entry.max_tokens,
                "method": self.method,
                "methods": {
                    name: choice.described(name == self.method)
                    for name, choice in self.methods.items()
                },
            },
        }


def load(name: str, entry: Entry) -> tuple[LLM, Known]:
    """Load a model and all that its methods need; `ValueError` that names it for what is wrong."""
    with named(name):
        default, methods = offered(entry)
        llm = LLM(entry.path, **entry.loading())
        roles = {llm.target.name: "target"}
        for choice in methods.values():
            for _, method in variants(choice):
                llm.pair(method)
                roles |= {path: role for role, path in method.models().items() if path not in roles}
    return llm, Known(
        place=llm.name, config=llm.config, methods=methods, method=default, roles=roles
    )


def load_all(entries: Mapping[str, Entry]) -> dict[str, tuple[LLM, Known]]:
    """Load all models; `ValueError` as `load`, before any of them is loaded where one can tell."""
    check_all(entries)
    loaded = {}
    for name, entry in entries.items():
        with log_loading(name, entry.path):
            loaded[name] = load(name, entry)
    return loaded


def check_all(entries: Mapping[str, Entry]) -> None:
    """Raise `ValueError` for a model whose methods do not fit; none is loaded."""
    for name, entry in entries.items():
        with named(name):
            offered(entry)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put the name of a model in front of an error, which keeps its own."""
    try:
        yield
    except ValueError as error:
        raise prefixed(f"model {name}", error) from error
    except Fault as error:
        raise ValueError(f"model {name}: {error}") from error


def offered(entry: Entry) -> tuple[str, dict[str, Choice]]:
    """The method that requests need not name, and all that they may; nothing is loaded."""
    config = target_config(entry.path, max_length=entry.max_length, mask_id=entry.mask_id)
    default = entry.method or name_in(METHODS, type(native(config)))
    methods = {each.name: each for each in choices(config, entry, default)}
    known = {name for each in methods.values() for name in each.settings}
    if unknown := sorted(set(entry.limits) - known):
        message = f"limits: no method has an option {', '.join(unknown)}"
        raise OptionError(f"limits.{unknown[0]}", entry.limits[unknown[0]], message)
    if default not in methods:
        message = f"method: it is not decoded by {default}; by {', '.join(methods)}"
        raise OptionError("method", default, message)
    for choice in methods.values():
        for _, method in variants(choice):
            check_models(method, entry.path, config)
    return default, methods


def variants(choice: Choice) -> Iterator[tuple[Method, Method]]:
    """A method with each choice of further models."""
    named = [choice.settings[role].words for role in choice.kind.roles]
    for names in product(*named):
        yield choice.make(dict(zip(choice.kind.roles, names, strict=True)))


def choices(config: ModelConfig, entry: Entry, default: str) -> Iterator[Choice]:
    """The methods that fit a model and whose roles are filled."""
    kinds = {name: load_config(path).kind for name, path in entry.further.items()}
    for name in [default, *(entry.methods or ())]:
        find_method(name)
    for name, kind in METHODS.items():
        fits = config.kind in kind.decodes and name in (entry.methods or METHODS)
        roles = {
            role: tuple(n for n in kinds if kinds[n] in wanted)
            for role, wanted in kind.roles.items()
        }
        if fits and all(roles.values()):
            given = entry.options if name == default else {}
            settings = {
                each.name: setting(each, given, roles, entry, FINEST * config.max_length)
                for each in options_of(kind).values()
            }
            if unknown := sorted(set(given) - set(settings)):
                message = f"options: {name} has no option {', '.join(unknown)}"
                raise OptionError(f"options.{unknown[0]}", given[unknown[0]], message)
            yield Choice(name=name, kind=kind, settings=settings, paths=entry.further)


def setting(
    option: Option,
    given: Mapping[str, Any],
    roles: Mapping[str, tuple[str, ...]],
    entry: Entry,
    most: int,
) -> Setting:
    """An option as the operator wants it."""
    words = roles.get(option.name, option.words)
    default = given.get(option.name, words[0] if option.needed else option.default)
    if option.name in roles and default not in words:
        param = f"options.{option.name}"
        message = f"{param} is {default!r}; further has {', '.join(words)}"
        raise OptionError(param, default, message)
    limits = entry.limits.get(option.name)
    if option.kind in (int, float):
        bounds: tuple[float, float] = (1, most) if option.kind is int else (0.0, LARGEST)
        match limits:
            case [int() | float() as least, int() | float() as largest] if least <= largest:
                bounds = least, largest
            case list():
                param = f"limits.{option.name}"
                message = f"{param} must be the least and the most of a number, not {limits}"
                raise OptionError(param, limits, message)
        return Setting(option=option, default=default, words=words, bounds=bounds)
    if limits is not None:
        if unknown := [each for each in limits if each not in words]:
            param = f"limits.{option.name}"
            message = f"{param} has {unknown[0]!r}; known are {words}"
            raise OptionError(param, limits, message)
        words = tuple(map(str, limits))
    return Setting(option=option, default=default, words=words)
