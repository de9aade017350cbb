"""Server configuration: listening address, limits, models."""

from __future__ import annotations

import os
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
)

from outpace.api.loading import LOAD_OPTIONS, LoadOptions
from outpace.api.options import Info, list_options
from outpace.checkpoints.load import head_name, target_config
from outpace.checkpoints.name import distinct_name, name_of
from outpace.engine.pairing import accepts_head
from outpace.engine.pairing import further_models as models_of
from outpace.errors import OptionError, prefix_error
from outpace.methods import METHODS, Method
from outpace.models.config import ModelConfig
from outpace.server.logs import LogFormat
from outpace.server.schema import bounded_type, requirement


@dataclass(kw_only=True)
class ServeOptions:
    """Options of a served model, shared by flags and TOML."""

    max_tokens: Annotated[
        int | None,
        Info(
            "Maximum tokens of an answer.", "serving", usual="rest of the context", bounds={"ge": 1}
        ),
    ] = None
    lazy: Annotated[
        bool, Info("Load models when they are first requested, and unload idle ones.", "serving")
    ] = False
    keep: Annotated[
        str | None,
        Info(
            "Time without requests after which a lazy model is unloaded: 90s, 10m, 2h or 1d.",
            "serving",
            usual="10m",
        ),
    ] = None


SERVE_OPTIONS = list_options(ServeOptions)
"""Options of a served model by name."""


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
            message = f"--model must be name=path, or a path, got {text!r}"
            raise OptionError("model", text, message)
        elif name in named_paths:
            raise OptionError("model", text, f"--model: the name {name} is given twice")
        else:
            named_paths[name] = path
    models: dict[str, str] = {}
    for path in unnamed:
        models[distinct_name(name_of(path), {*named_paths, *models})] = path
    return models | named_paths


Seconds = Annotated[float, Field(gt=0, le=86400)]

ERROR_MESSAGES = {
    "extra_forbidden": "is unknown",
    "missing": "is missing",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def validate_option_value(option: object) -> object:
    """Return a value that an option may have."""
    if isinstance(option, str | int | float):
        return option
    raise ValueError("must be a text, a number, true or false")


def validate_option_limit(option: object) -> object:
    """Return a limit of an option: a list of two numbers, or of words."""
    if isinstance(option, list):
        for kind in (str, int | float):
            if all(isinstance(each, kind) for each in option):
                return option
    raise ValueError("must be a list of a minimum and a maximum, or of words")


def resolve_path(model: str) -> str:
    """Return an existing path in full, so that error messages can hide it; names unchanged."""
    return os.path.abspath(model) if os.path.exists(model) else model


ModelPath = Annotated[str, AfterValidator(resolve_path)]
OptionValue = Annotated[str | int | float | bool, PlainValidator(validate_option_value)]
OptionLimit = Annotated[list[float] | list[str], PlainValidator(validate_option_limit)]

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
"""Host names of this machine."""


class FrozenModel(BaseModel):
    """Immutable model with exact types and no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Settings(FrozenModel):
    """Settings of the server as a whole.

    Attributes:
        host: Address to listen on.
        port: Port to listen on.
        api_key: Bearer token that clients must send; None accepts everyone.
        api_key_file: File that contains the key.
        insecure: Whether to listen on other addresses than loopback without a key.
        max_waiting: Maximum number of waiting requests per model, in addition to running ones.
        read_seconds: Time limit for a client to send its headers, to send its body, and to read
            what is written to it.
        drain_seconds: Time limit for pending requests after a signal to stop.
        step_seconds: Maximum duration of an engine step; a longer one ends the process.
        verbose: Whether to log also requests, and what was selected for this processor.
        log_format: Format of the log, `text` or `json`; the latter includes requests.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_key: Annotated[str, Field(min_length=1)] | None = None
    api_key_file: str | None = None
    insecure: bool = False
    max_waiting: Annotated[int, Field(ge=0)] = 256
    read_seconds: Seconds = 30.0
    drain_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    step_seconds: Annotated[float, Field(ge=1, le=86400)] = 60.0
    verbose: bool = False
    log_format: LogFormat = "text"

    def read_key(self) -> bytes | None:
        """Return the API key, or None.

        Raises:
            ValueError: If the key file cannot be read or is empty.
        """
        if self.api_key is not None and self.api_key_file is not None:
            raise OptionError("api_key", None, "api_key: cannot be combined with api_key_file")
        if self.api_key_file is None:
            return None if self.api_key is None else self.api_key.encode()
        try:
            key = Path(self.api_key_file).read_bytes().strip()
        except (OSError, ValueError) as error:
            message = f"api_key_file cannot be read: {error}"
            raise OptionError("api_key_file", self.api_key_file, message) from error
        if not key:
            message = f"api_key_file: {self.api_key_file} is empty"
            raise OptionError("api_key_file", self.api_key_file, message)
        return key

    @property
    def is_local(self) -> bool:
        """Whether only this machine, including pages open in its browsers, reaches the server."""
        return self.host in LOOPBACK_HOSTS

    def check_access(self) -> None:
        """Raise `ValueError` for an invalid key, or for public access without a key."""
        if not (self.read_key() or self.is_local or self.insecure):
            raise OptionError(
                "host",
                self.host,
                f"host {self.host!r} is reachable from other machines: set an API key "
                "(--api-key-file), or --insecure to accept everyone",
            )


if TYPE_CHECKING:

    class EntryOptions(FrozenModel, LoadOptions, ServeOptions):
        """The options of an `LLM`, and those of serving it."""

else:
    EntryOptions = create_model(
        "EntryOptions",
        __base__=FrozenModel,
        **{
            option.name: (bounded_type(option), option.default)
            for option in (*LOAD_OPTIONS.values(), *SERVE_OPTIONS.values())
        },
    )


class Entry(EntryOptions):
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

    path: ModelPath
    method: str | None = None
    options: Mapping[str, OptionValue] = {}
    methods: list[str] | None = None
    adapters: Mapping[str, ModelPath] | None = None
    further: Mapping[str, ModelPath] = {}
    limits: Mapping[str, OptionLimit] = {}

    def read_model_config(self) -> ModelConfig:
        """Return the model's configuration with the operator's changes."""
        return target_config(self.path, max_length=self.max_length, mask_id=self.mask_id)

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

    def load_options(self) -> dict[str, Any]:
        """Return the options of its `LLM`."""
        return self.model_dump(include={*LOAD_OPTIONS})


class Config(FrozenModel):
    """Configuration file of a server."""

    server: Settings = Settings()
    models: Annotated[dict[str, Entry], Field(min_length=1)]

    def check_consistency(self) -> None:
        """Raise `ValueError` for invalid settings or names."""
        self.server.check_access()
        for name, entry in self.models.items():
            for adapter in entry.adapters or ():
                if (both := f"{name}:{adapter}") in self.models:
                    message = f"adapters: {both} is also the name of a model: rename one of them"
                    raise OptionError("adapters", adapter, message)


ConfigSection = TypeVar("ConfigSection", bound=FrozenModel)


def parse_section(
    kind: type[ConfigSection], values: Mapping[str, Any], where: str
) -> ConfigSection:
    """Return a section from plain values; `OptionError` for an unknown key or invalid value."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise prefix_error(where, first_validation_error(error)) from None


def first_validation_error(error: ValidationError) -> OptionError:
    """Return an error for the first unknown or invalid key; API keys are not quoted."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda each: each["type"] != "extra_forbidden")
    place = ".".join(map(str, first["loc"]))
    if first["type"] in ERROR_MESSAGES:
        return OptionError(place, None, f"{place} {ERROR_MESSAGES[first['type']]}")
    cause = first.get("ctx", {}).get("error")
    problem = requirement(first["msg"]) if cause is None else cause
    if place.endswith("api_key"):
        return OptionError(place, None, f"{place} {problem}")
    value = first["input"]
    return OptionError(place, value, f"{place} {problem}, got {reprlib.repr(value)}")


def read_config(path: Path) -> Config:
    """Return the configuration of a TOML file; `ValueError` for an invalid one."""
    if not path.is_file():
        message = f"config: no file at {str(path)!r}; set it to a TOML file"
        raise OptionError("config", path, message)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    return parse_section(Config, table, str(path))


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
    values: dict[str, Any] = {"path": path, "further": dict(further), **loading}
    if method is not None:
        roles = models_of(method, path)
        options = {f.name: getattr(method, f.name) for f in fields(method)}
        named = name_role_models(roles, further)
        options = {k: v for k, v in (options | named).items() if v is not None}
        # The method's own models come first: they are the defaults of its roles.
        values["further"] = {named[role]: name for role, name in roles.items()} | values["further"]
        values |= {"method": registered_name(METHODS, type(method)), "options": options}
    return parse_section(Entry, values, path)


def registered_name(registry: Mapping[str, type[Method]], kind: type[Method]) -> str:
    """Return the name under which a method is registered."""
    return next(name for name, each in registry.items() if each is kind)


def build_config(
    path: Path | None, models: Mapping[str, Entry], flags: Mapping[str, Any]
) -> Config:
    """Return the configuration of a file or of `models`; flags override the file."""
    file_config = None if path is None else read_config(path)
    server = {} if file_config is None else file_config.server.model_dump(exclude_unset=True)
    return Config(
        server=parse_section(Settings, server | dict(flags), "command line"),
        models=dict(models or zoo_entries()) if file_config is None else file_config.models,
    )
