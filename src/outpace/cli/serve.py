"""The command that serves models over HTTP."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from typer import Argument, Exit, Option

from outpace.cli.flags import LOADING, Loading, one_thread
from outpace.errors import OptionError, prefixed
from outpace.methods import Method

if TYPE_CHECKING:
    from outpace.server.settings import Config, Entry


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How the server as a whole behaves."""

    host: Annotated[str | None, Option(help="Address to listen on; 127.0.0.1 by default.")] = None
    port: Annotated[int | None, Option(help="Port; 8000 by default, 0 for any.")] = None
    api_key: Annotated[str | None, Option(help="Key that clients must send.")] = None
    api_key_file: Annotated[Path | None, Option(help="File that holds the key.")] = None
    insecure: Annotated[bool, Option("--insecure", help="Listen elsewhere without a key.")] = False
    max_waiting: Annotated[int | None, Option(help="Requests that wait for a model.")] = None
    drain_seconds: Annotated[float | None, Option(help="Time of requests after SIGTERM.")] = None
    step_seconds: Annotated[float | None, Option(help="Longest step of the engine.")] = None
    verbose: Annotated[
        bool, Option("--verbose", help="Log also what was chosen for this processor.")
    ] = False

    def settings(self) -> dict[str, Any]:
        """Those that were given, as a file has them."""
        values = {n: str(v) if isinstance(v, Path) else v for n, v in vars(self).items()}
        return {n: v for n, v in values.items() if v is not None and v is not False}


SERVING = Serving()


def serve(
    model: Annotated[
        str | None, Argument(help="Folder, GGUF file, hub name, or model of the zoo.")
    ] = None,
    method: Method | None = None,
    models: Annotated[
        list[str] | None, Option("--model", help="name=path or path, once for each model.")
    ] = None,
    further: Annotated[
        list[str] | None, Option(help="name=path of a model that requests may name for a role.")
    ] = None,
    config: Annotated[Path | None, Option(help="TOML file of the server and its models.")] = None,
    max_tokens: Annotated[
        int | None, Option(help="Most tokens of any answer.", show_default="what fits")
    ] = None,
    serving: Serving = SERVING,
    replicas: Annotated[
        int | None, Option(help="Processes that share the requests, on Ray; one for each GPU.")
    ] = None,
    max_replicas: Annotated[int | None, Option(help="As many of them under load.")] = None,
    loading: Loading = LOADING,
) -> None:
    """Serve models over HTTP, as OpenAI's clients ask; without any, those of the zoo."""
    check_system()
    try:
        from outpace.server import settings as given
        from outpace.server.logs import log_start, start_log
        from outpace.server.models import check_all
        from outpace.server.run import bound, run
        from outpace.server.service import Service
    except ImportError as error:
        raise ValueError(f"{error}; serving needs: pip install 'outpace[serve]'") from error
    if max_replicas is not None and replicas is None:
        raise OptionError("max_replicas", max_replicas, "--max-replicas goes with --replicas")
    named = given.named_models(model, models or ())
    if config is not None and named:
        raise ValueError("give models on the command line or in --config, not both")
    if not named and (method or further or max_tokens is not None or loading != LOADING):
        raise ValueError("--method, --further, --max-tokens and loading flags need a model")
    values = {"max_tokens": max_tokens, **vars(loading)}
    entries = {
        name: given.entry(path, method, dict(map(pair, further or ())), values)
        for name, path in named.items()
    }
    whole = given.merged(config, entries, serving.settings())
    start_log(verbose=whole.server.verbose)
    whole.check()
    check_all(whole.models)
    if replicas is not None:
        raise Exit(replicated(whole, replicas, max_replicas))
    with bound(whole.server) as own:
        small = are_small(whole.models)
        host, port = own.getsockname()[:2]
        log_start(host, port, len(whole.models))
        if any(entry.tensor_parallel > 1 for entry in whole.models.values()):
            if small:
                torch.set_num_threads(1)  # before layouts are tried
            raise Exit(run(Service.load(whole), own))  # torchrun has made its processes already
        raise Exit(run(Service.apart(whole, small=small), own))


def check_system() -> None:
    """Raise `ValueError` on Windows, which lacks the signals that end a server in order."""
    if not hasattr(signal, "pthread_sigmask"):
        raise ValueError("outpace serve needs Linux or macOS: on Windows, run it in WSL")


def replicated(config: Config, replicas: int, most: int | None) -> int:
    """Serve by several processes; the exit status."""
    try:
        from outpace.ray.run import run
    except ImportError as error:
        raise ValueError(f"{error}; --replicas needs: pip install 'outpace[ray]'") from error
    return run(config, replicas, most, small=are_small(config.models))


def are_small(models: Mapping[str, Entry]) -> bool:
    """Whether all models decode fastest on one thread; `ValueError` that names what is none."""
    small = True
    for name, entry in models.items():
        try:
            small &= one_thread(entry.path, entry.device)
        except ValueError as error:
            raise prefixed(f"model {name}", error) from error
    return small


def pair(text: str) -> tuple[str, str]:
    """Name and path of a model."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError(f"{text!r} names no model; write name=path")
    return name, path
