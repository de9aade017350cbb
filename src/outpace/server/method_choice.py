"""Methods that requests may select for a model, and the limits of their options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from outpace.api.options import REQUEST_OPTIONS, option_fields, option_info
from outpace.checkpoints.load import load_config
from outpace.decoding import CAUSAL_KINDS
from outpace.errors import OptionError
from outpace.field_types import Option, list_options
from outpace.methods import METHODS, Method
from outpace.methods.method import SharesText
from outpace.methods.options import open_method
from outpace.models.config import ModelConfig
from outpace.server.http_error import HttpError
from outpace.server.schema import BaseRequest, CompletionRequest, get_field
from outpace.server.settings import Entry

OPTIONS_BY_FIELD = {
    field: option for option in REQUEST_OPTIONS.values() for field in option_fields(option)
}
"""Options by the request fields that set them."""

SEQUENTIAL_FIELDS = tuple(
    field for field, option in OPTIONS_BY_FIELD.items() if option_info(option).sequential
)
"""Fields that need left-to-right decoding: penalties and grammars depend on all earlier tokens."""

CAUSAL_FIELDS = ("prompt_logprobs",)
"""Fields supported only by methods of causal models."""

NOT_COMMON = SEQUENTIAL_FIELDS + CAUSAL_FIELDS

COMMON_FIELDS = (
    *("n", "max_completion_tokens", "response_format", "structured_outputs"),
    *("tools", "tool_choice", "parallel_tool_calls", "top_logprobs"),
    *("continue_final_message", "add_generation_prompt"),
    *(field for field in OPTIONS_BY_FIELD if "." not in field and field not in NOT_COMMON),
    *("stream", "stream_options", "return_progress", "outpace.trace"),
)
"""Fields that every method supports."""

OUT_OF_ORDER_FIELDS = ("outpace.provisional",)
"""Fields supported only by methods that choose tokens out of order."""

INFILL_FIELDS = ("outpace.fill",)
"""Fields supported only by methods whose holes attend to later text."""

NEUTRAL_VALUES = {field: OPTIONS_BY_FIELD[field].default for field in NOT_COMMON}
"""Values with which a field has no effect."""


def option_field(option: str) -> str:
    """Return the request field of an option; other names are returned unchanged."""
    names = option_fields(REQUEST_OPTIONS[option]) if option in REQUEST_OPTIONS else ()
    return names[0] if names else option


def supported_fields(method: Method) -> tuple[str, ...]:
    ordered = SEQUENTIAL_FIELDS if method.is_sequential else OUT_OF_ORDER_FIELDS
    causal = CAUSAL_FIELDS if set(method.target_kinds) <= set(CAUSAL_KINDS) else ()
    return COMMON_FIELDS + ordered + causal + (INFILL_FIELDS if method.sees_ahead else ())


def check_supported_fields(request: BaseRequest, method: Method) -> None:
    supported = {*supported_fields(method)}
    echoes = isinstance(request, CompletionRequest) and request.echoes_scores
    if echoes and not supported.issuperset(CAUSAL_FIELDS):
        raise HttpError(
            400,
            f"echo: log-probabilities of the prompt are not supported by {type(method).__name__}; "
            "omit echo or logprobs",
            param="echo",
        )
    for name in (*NOT_COMMON, *OUT_OF_ORDER_FIELDS, *INFILL_FIELDS):
        used = get_field(request, name) not in (None, NEUTRAL_VALUES.get(name, False))
        if used and name not in supported:
            raise HttpError(400, f"{name}: not supported by {type(method).__name__}", param=name)


MAX_FLOAT_OPTION = 1000.0
"""Default upper bound of float options."""

MAX_COUNT_PER_TOKEN = 16
"""Default upper bound of integer options, per token of the context length."""


@dataclass(frozen=True, kw_only=True)
class MethodOption:
    """An option of a method, with its default and the values that requests may set."""

    option: Option
    default: Any
    choices: tuple[str, ...]
    bounds: tuple[float, float] | None = None

    def check_value(self, value: Any) -> None:
        """Raise `HttpError` for a value that the operator does not allow."""
        match value:
            case str():
                allowed = value in self.choices
            case True if self.option.mark(SharesText) and not self.default:
                param = f"outpace.options.{self.option.name}"
                raise HttpError(
                    400, f"{param}: only the operator of the server can set it", param=param
                )
            case bool() | None:
                allowed = True  # validated by the method
            case _:
                allowed = self.bounds is not None and self.bounds[0] <= value <= self.bounds[1]
        if not allowed and value != self.default:
            expected = list(self.choices) or ["true", "false"] * (self.option.kind is bool)
            if self.bounds is not None:
                expected.append("a number from {:g} to {:g}".format(*self.bounds))
            param = f"outpace.options.{self.option.name}"
            raise HttpError(
                400, f"{param}: must be {' or '.join(expected)}, got {value!r}", param=param
            )

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.option.name,
            "help": self.option.text,
            "type": self.option.kind.__name__,
            "nullable": self.option.is_nullable,
            "choices": list(self.choices) or None,
            "default": self.default,
            "minimum": self.bounds and self.bounds[0],
            "maximum": self.bounds and self.bounds[1],
        }


@dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """A method that requests may select for a model."""

    name: str
    method_type: type[Method]
    options: Mapping[str, MethodOption]
    paths: Mapping[str, str]
    """Paths of further models, by the names that requests use."""

    def create(self, values: Mapping[str, Any]) -> tuple[Method, Method]:
        """Return the method with public model names, and with model paths."""
        for name, value in values.items():
            if name not in self.options:
                names = ", ".join(self.options) or "none"
                param = f"outpace.options.{name}"
                raise HttpError(
                    400, f"{param}: unknown option of {self.name}; choose from {names}", param=param
                )
            self.options[name].check_value(value)
        return self.construct(values) if values else self.default_method

    @cached_property
    def default_method(self) -> tuple[Method, Method]:
        return self.construct({})

    def construct(self, options: Mapping[str, Any]) -> tuple[Method, Method]:
        values = {name: option.default for name, option in self.options.items()} | dict(options)
        try:
            shown = self.method_type(**values)
        except OptionError as error:
            param = f"outpace.options.{error.param}"
            raise HttpError(400, str(error.with_param(param)), param=param) from None
        except ValueError as error:
            param = "outpace.options"
            raise HttpError(400, f"{param}: {error}", param=param) from None
        paths = {role: self.paths[values[role]] for role in self.method_type.roles}
        return shown, replace(shown, **paths) if paths else shown

    def describe(self, default: bool) -> dict[str, Any]:
        shown, _ = self.create({})
        supported = supported_fields(shown)
        return {
            "about": (self.method_type.__doc__ or "").splitlines()[0],
            "default": default,
            "options": [each.describe() for each in self.options.values()],
            "fields": supported,
            "provisional": "outpace.provisional" in supported,
        }


def method_variants(choice: MethodChoice) -> Iterator[tuple[Method, Method]]:
    """Yield the method with each combination of further models."""
    role_models = [choice.options[role].choices for role in choice.method_type.roles]
    # All are checked when the server starts, so that no request fails for its models.
    for names in product(*role_models):
        yield choice.create(dict(zip(choice.method_type.roles, names, strict=True)))


def method_choices(config: ModelConfig, entry: Entry, default: str) -> Iterator[MethodChoice]:
    """Yield the methods that suit a model and whose roles can be filled."""
    further = entry.further_models()
    model_kinds = {name: load_config(path).kind for name, path in further.items()}
    named = {name: open_method(name) for name in [default, *(entry.methods or ())]}
    methods = {**METHODS, **named}
    for name, method_type in methods.items():
        fits = config.kind in method_type.target_kinds and name in (entry.methods or methods)
        roles = {
            role: tuple(n for n in model_kinds if model_kinds[n] in wanted)
            for role, wanted in method_type.roles.items()
        }
        if fits and all(roles.values()):
            defaults = entry.options if name == default else {}
            settings = {
                each.name: method_option(
                    each, defaults, roles, entry, MAX_COUNT_PER_TOKEN * config.max_length
                )
                for each in list_options(method_type).values()
            }
            if unknown := sorted(set(defaults) - set(settings)):
                raise OptionError(
                    f"options.{unknown[0]}", defaults[unknown[0]], f"is no option of {name}"
                )
            yield MethodChoice(name=name, method_type=method_type, options=settings, paths=further)


def method_option(
    option: Option,
    defaults: Mapping[str, Any],
    roles: Mapping[str, tuple[str, ...]],
    entry: Entry,
    max_count: int,
) -> MethodOption:
    """Return an option with the default and limits that the operator configured."""
    choices = roles.get(option.name, option.words)
    is_free = option.is_required or option.name in roles
    default = defaults.get(option.name, choices[0] if is_free else option.default)
    if option.name in roles and default not in choices:
        param = f"options.{option.name}"
        raise OptionError(param, default, f"must be one of the further models {', '.join(choices)}")
    limits = entry.limits.get(option.name)
    if option.kind in (int, float):
        bounds: tuple[float, float] = (
            (1, max_count) if option.kind is int else (0.0, MAX_FLOAT_OPTION)
        )
        match limits:
            case [int() | float() as lowest, int() | float() as highest] if lowest <= highest:
                bounds = lowest, highest
            case list():
                param = f"limits.{option.name}"
                raise OptionError(param, limits, "must be a list of a minimum and a maximum")
        return MethodOption(option=option, default=default, choices=choices, bounds=bounds)
    if limits is not None:
        if unknown := [each for each in limits if each not in choices]:
            param = f"limits.{option.name}"
            raise OptionError(param, limits, f"unknown value {unknown[0]!r}; choose from {choices}")
        choices = tuple(map(str, limits))
    return MethodOption(option=option, default=default, choices=choices)
