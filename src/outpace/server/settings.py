"""What an operator decides: where the server listens, and which models it has."""

from __future__ import annotations

import os
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
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

from outpace.api.loading import LOAD, LoadOptions
from outpace.checkpoints.name import distinct_name, name_of
from outpace.engine.pairing import named as models_of
from outpace.errors import OptionError, prefixed
from outpace.methods import METHODS, Method
from outpace.server.bounds import bounded

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86400)]

FAULTS = {
    "extra_forbidden": "is unknown",
    "missing": "is missing",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def value(given: object) -> object:
    """What an option may be."""
    if isinstance(given, str | int | float):
        return given
    raise ValueError("must be a text, a number, true or false")


def limit(given: object) -> object:
    """What an option may be limited to."""
    if isinstance(given, list):
        for kind in (str, int | float):
            if all(isinstance(each, kind) for each in given):
                return given
    raise ValueError("must be a list of its least and most, or of words")


def located(model: str) -> str:
    """A path in full, so that it is found in a message; a name of the hub or the zoo unchanged."""
    return os.path.abspath(model) if os.path.exists(model) else model


Located = Annotated[str, AfterValidator(located)]
Value = Annotated[str | int | float | bool, PlainValidator(value)]
Limit = Annotated[list[float] | list[str], PlainValidator(limit)]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Names of this machine."""


class Strict(BaseModel):
    """Exact types, and no key that nobody reads."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Settings(Strict):
    """How the server as a whole behaves.

    Attributes:
        api_key: what clients must send as a bearer token; None lets everybody in.
        insecure: whether to listen on other addresses than loopback without a key.
        max_waiting: requests that may be in hand beyond those that run, for each model.
        read_seconds: time that a client has to send its headers, to send its body, and to take
            what is written to it.
        drain_seconds: time that requests in hand have once the server is told to end.
        step_seconds: a step of the engine that takes longer ends the process.
        verbose: whether to log also what was chosen for this processor.
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

    def key(self) -> bytes | None:
        """The key that clients must send; `ValueError` for a file without one."""
        if self.api_key is not None and self.api_key_file is not None:
            raise OptionError("api_key", None, "api_key: give api_key or api_key_file, not both")
        if self.api_key_file is None:
            return None if self.api_key is None else self.api_key.encode()
        try:
            key = Path(self.api_key_file).read_bytes().strip()
        except (OSError, ValueError) as error:
            message = f"api_key_file cannot be read: {error}"
            raise OptionError("api_key_file", self.api_key_file, message) from error
        if not key:
            message = f"api_key_file: {self.api_key_file} holds no key"
            raise OptionError("api_key_file", self.api_key_file, message)
        return key

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it, and so pages that a browser here has open."""
        return self.host in LOOPBACK

    def check(self) -> None:
        """Raise `ValueError` for a key that is none, and where everybody could ask without one."""
        if not (self.key() or self.local or self.insecure):
            raise OptionError(
                "host",
                self.host,
                f"host {self.host!r} can be reached from elsewhere: give an API key "
                "(--api-key-file), or --insecure where everybody may ask",
            )


if TYPE_CHECKING:

    class Loaded(Strict, LoadOptions):
        """The options of an `LLM`."""

else:
    Loaded = create_model(
        "Loaded", __base__=Strict, **{o.name: (bounded(o), o.default) for o in LOAD.values()}
    )


class Entry(Loaded):
    """One model of the server.

    Attributes:
        path: folder, hub name, or model of the zoo.
        method: how it decodes unless a request says otherwise; its family's by default.
        options: options of that method.
        methods: those that requests may choose; all that fit by default.
        further: models that requests may name for a role, by the names that they use, and where
            these are.
        limits: least and most of a number, or the words that are allowed, for options of methods.
        max_tokens: most tokens of an answer that a request may ask for.
    """

    path: Located
    method: str | None = None
    options: Mapping[str, Value] = {}
    methods: list[str] | None = None
    further: Mapping[str, Located] = {}
    limits: Mapping[str, Limit] = {}
    max_tokens: Positive | None = None

    def loading(self) -> dict[str, Any]:
        """The options of its `LLM`."""
        return self.model_dump(include={*LOAD})


class Config(Strict):
    """A whole file."""

    server: Settings = Settings()
    models: Annotated[dict[str, Entry], Field(min_length=1)]

    def check(self) -> None:
        """Raise `ValueError` for settings of the server, and for more than one split model."""
        self.server.check()
        split = [name for name, entry in self.models.items() if entry.tensor_parallel > 1]
        if split and len(self.models) > 1:
            message = f"tensor_parallel: the processes of {split[0]} hold one model; serve it alone"
            raise OptionError("tensor_parallel", split, message)


Section = TypeVar("Section", bound=Strict)


def checked(kind: type[Section], values: Mapping[str, Any], where: str) -> Section:
    """Settings from plain values; `ValueError` that names the first key that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise prefixed(where, fault(error)) from None


def fault(error: ValidationError) -> OptionError:
    """The first key that is unknown, or wrong, with its value; that of a key stays secret."""
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda each: each["type"] != "extra_forbidden")
    place = ".".join(map(str, first["loc"]))
    if first["type"] in FAULTS:
        return OptionError(place, None, f"{place} {FAULTS[first['type']]}")
    raised = first.get("ctx", {}).get("error")
    told = first["msg"].replace("Input should", "must") if raised is None else raised
    if place.endswith("api_key"):
        return OptionError(place, None, f"{place} {told}")
    given = first["input"]
    return OptionError(place, given, f"{place} {told}, not {reprlib.repr(given)}")


def read(path: Path) -> Config:
    """The settings of a TOML file; `ValueError` for what cannot be read or is unknown."""
    if not path.is_file():
        message = f"config: no settings at {str(path)!r}; give a TOML file"
        raise OptionError("config", path, message)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    return checked(Config, table, str(path))


ZOO_CACHE = 0.25
"""GiB for the cache of each model of the zoo: some eighty requests of full length."""

ZOO: dict[str, tuple[str, ...]] = {
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
"""Models that are served where none is named, and those that may draft or verify for them."""

METHOD: dict[str, dict[str, Any]] = {
    "tiny-d2f": {"method": "d2f", "options": {"add": 0.5, "confidence": 0.98}}
}
"""How they decode where that is not their family's way: as docs/results.md measures them."""


def zoo() -> dict[str, Entry]:
    """The models of the zoo."""
    return {
        name: Entry(
            path=name,
            further={each: each for each in further},
            cache_gib=ZOO_CACHE,
            **METHOD.get(name, {}),
        )
        for name, further in ZOO.items()
    }


def entry(
    path: str, method: Method | None, further: Mapping[str, str], loading: Mapping[str, Any]
) -> Entry:
    """A model of the command line, with the models that its method names."""
    values: dict[str, Any] = {"path": path, "further": dict(further), **loading}
    if method is not None:
        roles = models_of(method, path)
        options = {f.name: getattr(method, f.name) for f in fields(method)}
        named = named_roles(roles, further)
        options = {k: v for k, v in (options | named).items() if v is not None}
        # The names that the method gives come first: they are what its roles are by default.
        values["further"] = {named[role]: name for role, name in roles.items()} | values["further"]
        values |= {"method": name_in(METHODS, type(method)), "options": options}
    return checked(Entry, values, path)


def named_roles(roles: Mapping[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """Name the model of each role: as in `further`, or as its file, told apart by a number."""
    places = dict(further)
    named = {}
    for role, path in roles.items():
        same = (name for name, place in places.items() if place == path)
        named[role] = next(same, None) or distinct_name(name_of(path), places)
        places[named[role]] = path
    return named


def named_models(model: str | None, others: Iterable[str]) -> dict[str, str]:
    """Name the models of a command line: `others` by `name=path`, or by a path alone.

    Raises `ValueError` for a name that was given twice.
    """
    unnamed = [] if model is None else [model]
    named: dict[str, str] = {}
    for text in others:
        name, equals, path = text.partition("=")
        if not equals or os.path.exists(text):
            unnamed.append(text)
        elif not (name and path):
            message = f"--model {text!r} names no model; write name=path, or a path"
            raise OptionError("model", text, message)
        elif name in named:
            raise OptionError("model", text, f"--model: a name was given twice: {name}")
        else:
            named[name] = path
    models: dict[str, str] = {}
    for path in unnamed:
        models[distinct_name(name_of(path), {*named, *models})] = path
    return models | named


def name_in(registry: Mapping[str, type[Method]], kind: type[Method]) -> str:
    """Under which name a method is registered."""
    return next(name for name, each in registry.items() if each is kind)


def merged(path: Path | None, models: Mapping[str, Entry], flags: Mapping[str, Any]) -> Config:
    """What a file says, or else models; what flags say goes before the file."""
    known = None if path is None else read(path)
    server = {} if known is None else known.server.model_dump(exclude_unset=True)
    return Config(
        server=checked(Settings, server | dict(flags), "command line"),
        models=dict(models or zoo()) if known is None else known.models,
    )
