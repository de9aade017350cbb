"""Server configuration: listening address, limits, models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from outpace.api.loading import LOAD_OPTIONS, LoadOptions
from outpace.checkpoints.name import distinct_name, head_name, name_of
from outpace.engine.pairing import MethodSelector, accepts_head
from outpace.errors import OptionError, prefix_error
from outpace.field_types import check_fields, check_value
from outpace.methods import METHODS, Method
from outpace.methods.options import method_name
from outpace.models.config import ModelConfig
from outpace.server.serve_options import ServeOptions
from outpace.server.start import Settings, parse_section, read_table


def name_role_models(roles: Mapping[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """Name the model of each role as in `further`, or by its file with a number if ambiguous."""
    places = dict(further)
    names = {}
    for role, path in roles.items():
        same = (name for name, place in places.items() if place == path)
        names[role] = next(same, None) or distinct_name(name_of(path), places)
        places[names[role]] = path
    return names


def name_models(model: str | None, others: Iterable[str]) -> dict[str, str]:
    """Name the models of a command line: `name=path`, or a path alone.

    Raises:
        OptionError: If a name is given twice.
    """
    unnamed = [] if model is None else [model]
    named_paths: dict[str, str] = {}
    for text in others:
        name, equals, path = text.partition("=")
        if not equals or os.path.exists(text):
            unnamed.append(text)
        elif not (name and path):
            raise OptionError("model", text, "must be name=path, or a path")
        elif name in named_paths:
            raise OptionError("model", text, f"the name {name} is given twice")
        else:
            named_paths[name] = path
    models: dict[str, str] = {}
    for path in unnamed:
        models[distinct_name(name_of(path), {*named_paths, *models})] = path
    return models | named_paths


def resolve_path(model: str) -> str:
    """Return an existing path in full, so that error messages can hide it; names unchanged."""
    return os.path.abspath(model) if os.path.exists(model) else model


@dataclass(frozen=True, kw_only=True)
class Entry(LoadOptions, ServeOptions):
    """One model of the server, with the options of its `LLM`.

    Attributes:
        path: Folder, Hugging Face name, or model of the zoo.
        method: Default decoding method; that of the model family if None.
        options: Options of that method.
        methods: Methods that requests may select; all that fit if None.
        adapters: Paths of adapters that requests select as models `NAME:ADAPTER`, by adapter.
        further: Paths of further models that requests may select for a role, by public name.
        limits: Minimum and maximum, or allowed words, for options of methods.
    """

    path: str
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] | None = None
    further: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in self.options.items():
            check_value(f"options.{name}", value, str | int | float | bool)
        for name, value in self.limits.items():
            check_value(f"limits.{name}", value, tuple[float, ...] | tuple[str, ...])
        for name in ("adapters", "further"):
            models = {
                each: resolve_path(check_value(f"{name}.{each}", path, str))
                for each, path in (getattr(self, name) or {}).items()
            }
            object.__setattr__(self, name, models or getattr(self, name))
        object.__setattr__(self, "path", resolve_path(self.path))

    def open_model(self) -> MethodSelector:
        return MethodSelector.open(
            self.path, max_length=self.max_length, mask_id=self.mask_id, adapter=self.adapter
        )

    def read_model_config(self) -> ModelConfig:
        """Return the model's configuration with the operator's changes."""
        return self.open_model().config

    def further_models(self) -> dict[str, str]:
        """Return the paths of further models by public name.

        If the operator selects a method whose draft may be the MTP head of the model's checkpoint,
        it is the last one, with the name `mtp`.
        """
        selected = (METHODS.get(name or "") for name in (self.method, *(self.methods or ())))
        uses_head = any(each and accepts_head(each) for each in selected)
        head = head_name(self.path)
        if not uses_head or head in self.further.values() or not self.read_model_config().mtp_heads:
            return dict(self.further)
        return {**self.further, "mtp": self.further.get("mtp", head)}

    def with_method(self, method: Method) -> Entry:
        """Return the entry with a default method and the models that it names."""
        names = self.open_model().model_names(method)
        roles = {role: resolve_path(name) for role, name in names.items()}
        named = name_role_models(roles, self.further)
        options = {f.name: getattr(method, f.name) for f in fields(method)} | named
        # The method's own models come first: they are the defaults of its roles.
        further = {named[role]: path for role, path in roles.items()} | dict(self.further)
        return replace(
            self,
            method=method_name(type(method)),
            options={name: value for name, value in options.items() if value is not None},
            further=further,
        )

    def load_options(self) -> dict[str, Any]:
        """Return the options of its `LLM`."""
        return {name: getattr(self, name) for name in LOAD_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration file of a server."""

    server: Settings = Settings()
    models: Mapping[str, Entry]

    def __post_init__(self) -> None:
        if not self.models:
            raise OptionError("models", None, "must not be empty")

    def check_consistency(self) -> None:
        """Raise `ValueError` for invalid settings or names, or a split model among several."""
        self.server.check_access()
        for name, entry in self.models.items():
            for adapter in entry.adapters or ():
                if (both := f"{name}:{adapter}") in self.models:
                    raise OptionError(
                        "adapters", adapter, f"{both} is a model's name too: rename one"
                    )
        split = [name for name, entry in self.models.items() if entry.tensor_parallel > 1]
        if split and len(self.models) > 1:
            raise OptionError(
                "tensor_parallel", split, f"{split[0]} must be the only model of the server"
            )


@dataclass(frozen=True, kw_only=True)
class FileTables:
    """The sections of a configuration file."""

    server: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


def read_config(path: Path) -> Config:
    """Return the configuration of a TOML file; `ValueError` for an invalid one."""
    table = read_table(path)
    try:
        file = parse_section(FileTables, table)
        return Config(
            server=parse_section(Settings, file.server, "server."),
            models={
                name: parse_section(Entry, entry, f"models.{name}.")
                for name, entry in file.models.items()
            },
        )
    except OptionError as error:
        raise prefix_error(str(path), error) from None


ZOO_CACHE_GIB = 0.25
"""Cache size of each zoo model in GiB: about eighty requests of full length."""

ZOO_FURTHER_MODELS: dict[str, tuple[str, ...]] = {
    "tiny-ar": ("tiny-dflash", "tiny-eagle", "tiny-aux"),
    "tiny-aux": (),
    "tiny-dream": ("tiny-aux",),
    "tiny-llada": ("tiny-aux",),
    "tiny-d2f": (),
    "tiny-block": (),
    "tiny-wedlm": (),
    "tiny-dream-sudoku": ("tiny-aux-sudoku",),
    "tiny-aux-sudoku": (),
}
"""Models served if none is given, and those that may draft or verify for them."""

ZOO_METHODS: dict[str, dict[str, Any]] = {
    "tiny-d2f": {"method": "d2f", "options": {"add": 0.5, "confidence": 0.98}}
}
"""Methods of zoo models other than their family's default, as measured in docs/results.md."""


def zoo_entries() -> dict[str, Entry]:
    """Return entries for the models of the zoo."""
    return {
        name: Entry(
            path=name,
            further={each: each for each in further},
            cache_gib=ZOO_CACHE_GIB,
            **ZOO_METHODS.get(name, {}),
        )
        for name, further in ZOO_FURTHER_MODELS.items()
    }


def make_entry(
    path: str, method: Method | None, further: Mapping[str, str], loading: Mapping[str, Any]
) -> Entry:
    """Return an entry for a model of the command line, with the models its method names."""
    try:
        entry = Entry(path=path, further=further, **loading)
    except OptionError as error:
        raise prefix_error(path, error) from None
    return entry if method is None else entry.with_method(method)


def build_config(
    path: Path | None, models: Mapping[str, Entry], flags: Mapping[str, Any]
) -> Config:
    """Return the configuration of a file or of `models`; flags override the file."""
    file_config = None if path is None else read_config(path)
    if file_config is None:
        file_config = Config(models=models or zoo_entries())
    return replace(file_config, server=replace(file_config.server, **flags))
