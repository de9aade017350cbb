"""Methods that requests may select for a model, and the limits of their options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from outpace.checkpoints.load import load_config
from outpace.errors import OptionError
from outpace.methods import METHODS, Method
from outpace.methods.options import Option, find_method, options_of
from outpace.models.config import ModelConfig
from outpace.server.fault import Fault
from outpace.server.fields import fields_of
from outpace.server.settings import Entry

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
        """Raise `HttpError` for a value that the operator does not allow."""
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
        method_type: Class of the method.
        options: Its options, by name.
        paths: Paths of further models, by the names that requests use.
    """

    name: str
    kind: type[Method]
    settings: Mapping[str, Setting]
    paths: Mapping[str, str]

    def make(self, values: Mapping[str, Any]) -> tuple[Method, Method]:
        """Return the method with public model names, and with model paths.

        Raises:
            HttpError: If an option is unknown or its value not allowed.
        """
        for name, value in values.items():
            if name not in self.settings:
                names = ", ".join(self.settings) or "none"
                param = f"outpace.options.{name}"
                message = f"{param}: unknown option of {self.name}; choose from {names}"
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
            HttpError: If the options are inconsistent.
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
