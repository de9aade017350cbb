"""Served models, and the methods that requests may select for them."""

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
"""Default upper bound of float options."""

FINEST = 16
"""Default upper bound of integer options, per token of the context length."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An option of a method, with its default and the values that requests may set."""

    option: Option
    default: Any
    words: tuple[str, ...]
    bounds: tuple[float, float] | None = None

    def check(self, value: Any) -> None:
        """Raise `RequestError` for a value that the operator does not allow."""
        match value:
            case str():
                allowed = value in self.words
            case bool() | None:
                allowed = True  # validated by the method
            case _:
                allowed = self.bounds is not None and self.bounds[0] <= value <= self.bounds[1]
        if not allowed and value != self.default:
            expected = list(self.words) or ["true", "false"] * (self.option.kind is bool)
            if self.bounds is not None:
                expected.append("a number from {:g} to {:g}".format(*self.bounds))
            param = f"outpace.options.{self.option.name}"
            raise Fault(
                400, f"{param}: must be {' or '.join(expected)}, got {value!r}", param=param
            )

    def described(self) -> dict[str, Any]:
        """Return the entry of `GET /v1/models`."""
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
    """A method that requests may select for a model.

    Attributes:
        name: Name under which the method is registered.
        kind: Class of the method.
        settings: Its options, by name.
        paths: Paths of further models, by the names that requests use.
    """

    name: str
    kind: type[Method]
    settings: Mapping[str, Setting]
    paths: Mapping[str, str]

    def make(self, values: Mapping[str, Any]) -> tuple[Method, Method]:
        """Return the method with public model names, and with model paths.

        Raises:
            RequestError: If an option is unknown or its value not allowed.
        """
        for name, value in values.items():
            if name not in self.settings:
                known = ", ".join(self.settings) or "none"
                param = f"outpace.options.{name}"
                message = f"{param}: unknown option of {self.name}; choose from {known}"
                raise Fault(400, message, param=param)
            self.settings[name].check(value)
        return self.made(values) if values else self.usual

    @cached_property
    def usual(self) -> tuple[Method, Method]:
        """The method with its default options."""
        return self.made({})

    def made(self, options: Mapping[str, Any]) -> tuple[Method, Method]:
        """Construct the method with allowed options.

        Raises:
            RequestError: If the options are inconsistent.
        """
        values = {name: option.default for name, option in self.settings.items()} | dict(options)
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
        """Return the entry of `GET /v1/models`."""
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
    """What the server must store about a model, in whichever process it is loaded.

    Attributes:
        place: Path of the model.
        config: Its configuration.
        methods: Methods that requests may select, by name.
        method: Name of the default method.
        roles: Roles of the engine's models, by model name.
    """

    place: str
    config: ModelConfig
    methods: dict[str, Choice]
    method: str
    roles: dict[str, str]


@dataclass(kw_only=True)
class Model(Known):
    """A model that clients can select, and the client of its engine."""

    name: str
    entry: Entry
    engine: ModelClient
    text: Text

    def __post_init__(self) -> None:
        decode = self.text.decode
        self.token = cache(lambda token: decode([token]))
        """Return the text of one token."""
        tokenizer = self.text.tokenizer
        longest = None if tokenizer is None else max(map(len, tokenizer.get_vocab()))
        self.characters = longest and longest * self.config.max_length
        """Upper bound for the characters of a prompt that fits; None without a tokenizer."""

    def choice(self, name: str | None) -> Choice:
        """Return a method by name, or the default method.

        Raises:
            RequestError: If requests may not select this method.
        """
        name = name or self.method
        if name not in self.methods:
            raise Fault(
                400,
                f"outpace.method: must be one of {', '.join(self.methods)} for {self.name}, "
                f"got {name!r}",
                param="outpace.method",
            )
        return self.methods[name]

    def public(self, message: str) -> str:
        """Replace the paths of models in a message by their public names."""
        further = {path: name for name, path in self.entry.further.items()}
        names = further | dict.fromkeys((self.place, self.entry.path), self.name)
        # Longest first, since one path may be a prefix of another.
        for path in sorted(names, key=len, reverse=True):
            message = message.replace(path, names[path])
        return message

    def described(self, created: int) -> dict[str, Any]:
        """Return the entry of `GET /v1/models`."""
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
    """Load a model and everything its methods need.

    Raises:
        ValueError: If the model or an option is invalid; the message names the model.
    """
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
    """Load all models, after validating all of them.

    Raises:
        ValueError: If a model or an option is invalid.
    """
    check_all(entries)
    loaded = {}
    for name, entry in entries.items():
        with log_loading(name, entry.path):
            loaded[name] = load(name, entry)
    return loaded


def check_all(entries: Mapping[str, Entry]) -> None:
    """Raise `ValueError` for models with unsuitable methods, without loading any."""
    for name, entry in entries.items():
        with named(name):
            offered(entry)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put the name of a model before the message of an error."""
    try:
        yield
    except ValueError as error:
        raise prefixed(f"model {name}", error) from error
    except Fault as error:
        raise ValueError(f"model {name}: {error}") from error


def offered(entry: Entry) -> tuple[str, dict[str, Choice]]:
    """Return the default method's name and all available methods; loads no weights."""
    config = target_config(entry.path, max_length=entry.max_length, mask_id=entry.mask_id)
    default = entry.method or name_in(METHODS, type(native(config)))
    methods = {each.name: each for each in choices(config, entry, default)}
    option_names = {name for each in methods.values() for name in each.settings}
    if unknown := sorted(set(entry.limits) - option_names):
        message = f"limits: unknown option {', '.join(unknown)}; no method has it"
        raise OptionError(f"limits.{unknown[0]}", entry.limits[unknown[0]], message)
    if default not in methods:
        message = f"method: must be one of {', '.join(methods)}, got {default}"
        raise OptionError("method", default, message)
    for choice in methods.values():
        for _, method in variants(choice):
            check_models(method, entry.path, config)
    return default, methods


def variants(choice: Choice) -> Iterator[tuple[Method, Method]]:
    """Yield the method with each combination of further models."""
    role_models = [choice.settings[role].words for role in choice.kind.roles]
    for names in product(*role_models):
        yield choice.make(dict(zip(choice.kind.roles, names, strict=True)))


def choices(config: ModelConfig, entry: Entry, default: str) -> Iterator[Choice]:
    """Yield the methods that suit a model and whose roles can be filled."""
    model_kinds = {name: load_config(path).kind for name, path in entry.further.items()}
    for name in [default, *(entry.methods or ())]:
        find_method(name)
    for name, method_type in METHODS.items():
        fits = config.kind in method_type.decodes and name in (entry.methods or METHODS)
        roles = {
            role: tuple(n for n in model_kinds if model_kinds[n] in wanted)
            for role, wanted in method_type.roles.items()
        }
        if fits and all(roles.values()):
            defaults = entry.options if name == default else {}
            settings = {
                each.name: setting(each, defaults, roles, entry, FINEST * config.max_length)
                for each in options_of(method_type).values()
            }
            if unknown := sorted(set(defaults) - set(settings)):
                message = f"options: unknown option {', '.join(unknown)} of {name}"
                raise OptionError(f"options.{unknown[0]}", defaults[unknown[0]], message)
            yield Choice(name=name, kind=method_type, settings=settings, paths=entry.further)


def setting(
    option: Option,
    defaults: Mapping[str, Any],
    roles: Mapping[str, tuple[str, ...]],
    entry: Entry,
    max_count: int,
) -> Setting:
    """Return an option with the default and limits that the operator configured."""
    choices = roles.get(option.name, option.words)
    default = defaults.get(option.name, choices[0] if option.needed else option.default)
    if option.name in roles and default not in choices:
        param = f"options.{option.name}"
        message = f"{param} must be one of the further models {', '.join(choices)}, got {default!r}"
        raise OptionError(param, default, message)
    limits = entry.limits.get(option.name)
    if option.kind in (int, float):
        bounds: tuple[float, float] = (1, max_count) if option.kind is int else (0.0, LARGEST)
        match limits:
            case [int() | float() as lowest, int() | float() as highest] if lowest <= highest:
                bounds = lowest, highest
            case list():
                param = f"limits.{option.name}"
                message = f"{param} must be a list of a minimum and a maximum, got {limits}"
                raise OptionError(param, limits, message)
        return Setting(option=option, default=default, words=choices, bounds=bounds)
    if limits is not None:
        if unknown := [each for each in limits if each not in choices]:
            param = f"limits.{option.name}"
            message = f"{param}: unknown value {unknown[0]!r}; choose from {choices}"
            raise OptionError(param, limits, message)
        choices = tuple(map(str, limits))
    return Setting(option=option, default=default, words=choices)
