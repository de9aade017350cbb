"""Start of a server: settings, address and engine process. Imports only what loads fast."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outpace.errors import OptionError, prefix_error
from outpace.server.logs import log_start, start_log
from outpace.server.option_types import option_model
from outpace.server.serve_options import ServerOptions

HEADER_VALUE = re.compile(rb"[!-~\x80-\xff]+([ \t]+[!-~\x80-\xff]+)*")
"""Bytes that HTTP transfers unchanged as the value of a header."""

ERROR_MESSAGES = {
    "extra_forbidden": "is unknown",
    "missing": "is missing",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


class FrozenModel(BaseModel):
    """Immutable model with exact types and no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


if TYPE_CHECKING:

    class SettingFields(FrozenModel, ServerOptions):
        """The options of a server."""

else:
    SettingFields = option_model("SettingFields", FrozenModel, ServerOptions)


class Settings(SettingFields):
    """Settings of the server as a whole."""

    api_key: Annotated[str, Field(min_length=1)] | None = None

    def read_key(self) -> bytes | None:
        if self.api_key is not None and self.api_key_file is not None:
            raise OptionError("api_key", None, "cannot be combined with api_key_file")
        if self.api_key_file is None:
            if self.api_key is None:
                return None
            return check_key("api_key", self.api_key.encode(errors="surrogateescape"))
        try:
            key = Path(self.api_key_file).read_bytes().strip()
        except (OSError, ValueError) as error:
            raise OptionError(
                "api_key_file", self.api_key_file, f"cannot be read: {error}"
            ) from error
        if not key:
            raise OptionError("api_key_file", self.api_key_file, f"{self.api_key_file} is empty")
        return check_key("api_key_file", key)

    @property
    def is_local(self) -> bool:
        """Whether only this machine, including pages open in its browsers, reaches the server."""
        return self.host in ("127.0.0.1", "::1", "localhost")

    def check_access(self) -> None:
        """Raise `ValueError` for an invalid key, or for public access without a key."""
        if not (self.read_key() or self.is_local or self.insecure):
            raise OptionError(
                "host",
                self.host,
                f"{self.host} needs an API key (--api-key-file), or --insecure to accept everyone",
            )


def check_key(param: str, key: bytes) -> bytes:
    """Return an API key; raises `OptionError` if no header can hold it, and does not quote it."""
    if not HEADER_VALUE.fullmatch(key):
        raise OptionError(param, None, "must be one line for a header, without spaces around it")
    return key


def requirement(message: str) -> str:
    """Return pydantic's message about a value, worded as a requirement."""
    return re.sub("(Input|String) should", "must", message)


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
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda each: each["type"] != "extra_forbidden")
    place = ".".join(map(str, first["loc"]))
    if first["type"] in ERROR_MESSAGES:
        return OptionError(place, None, ERROR_MESSAGES[first["type"]])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, OptionError) and not place:
        return cause
    problem = requirement(first["msg"]) if cause is None else str(cause)
    value = None if place.endswith("api_key") else first["input"]
    return OptionError(place, value, problem)


def read_table(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file; `ValueError` for an invalid one."""
    if not path.is_file():
        raise OptionError("config", path, f"no file at {str(path)!r}; set it to a TOML file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def bind_socket(settings: Settings) -> socket.socket:
    """Return a socket bound to the configured address."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise OptionError(
            "port", settings.port, f"cannot listen on {settings.host}:{settings.port}: {error}"
        ) from error
    return listener


ENTRY_CODE = """
import sys
sys.path[:] = {path!r}
from outpace.server.parent import exit_with_parent
exit_with_parent()
from outpace.server.engine_process import main
main({number})
"""
"""Code that the process runs. It searches modules where this process does, and nowhere else."""


class EngineHandle:
    """A new engine process, which waits for its models, and this end of the connection to it."""

    def __init__(self) -> None:
        self.socket, engine_socket = socket.socketpair()
        code = ENTRY_CODE.format(path=sys.path, number=engine_socket.fileno())
        command, shared = [sys.executable, "-c", code], [engine_socket.fileno()]
        # Ctrl-C signals all processes of a terminal, but the server must finish requests first.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            with engine_socket:
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=shared)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    def close(self) -> None:
        """Close the connection, and kill the process if it has not exited."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.socket.close()


ServerStart = tuple[socket.socket, EngineHandle]
"""Listening socket and engine process of a server whose models are not loaded yet."""


@contextmanager
def start_server(settings: Settings) -> Iterator[ServerStart]:
    """Listen, log the address and start the engine process; requests wait for the models."""
    start_log(verbose=settings.verbose, log_format=settings.log_format)
    with bind_socket(settings) as listener, closing(EngineHandle()) as engine:
        listener.listen()
        log_start(*listener.getsockname()[:2])
        yield listener, engine
