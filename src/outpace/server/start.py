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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from outpace.errors import OptionError
from outpace.field_types import check_fields, list_options
from outpace.server.logs import log_start, start_log
from outpace.server.serve_options import ServerOptions

HEADER_VALUE = re.compile(rb"[!-~\x80-\xff]+([ \t]+[!-~\x80-\xff]+)*")
"""Bytes that HTTP transfers unchanged as the value of a header."""


@dataclass(frozen=True, kw_only=True)
class Settings(ServerOptions):
    """Settings of the server as a whole."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not (isinstance(self.api_key, str) and self.api_key):
            raise OptionError("api_key", None, "must be a text that is not empty")
        check_fields(self)

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


Section = TypeVar("Section")


def parse_section(kind: type[Section], table: object, path: str = "") -> Section:
    """Return a section of a configuration; `OptionError` for an unknown key or invalid value.

    `path` precedes the names of keys in errors.
    """
    if not isinstance(table, Mapping):
        raise OptionError(path.rstrip("."), table, "must be a table")
    options = list_options(cast(Any, kind))
    try:
        for name in table.keys() - options.keys():
            raise OptionError(name, None, "is unknown")
        for name, option in options.items():
            if option.is_required and name not in table:
                raise OptionError(name, None, "is missing")
        return kind(**table)
    except OptionError as error:
        raise OptionError(path + error.param, error.value, error.reason) from None


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
