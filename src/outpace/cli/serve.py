"""The command `serve`, which serves models over HTTP."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Exit, Option

from outpace.cli.flags import LOAD_FLAGS, FlagGroup, LoadFlags, add_flags, uses_one_thread
from outpace.cli.options import MethodFlag
from outpace.cli.pull import fetch_model
from outpace.errors import OptionError, install_extra
from outpace.server.serve_options import ServeOptions, ServerOptions

if TYPE_CHECKING:
    from outpace.server.service import Service
    from outpace.server.settings import Config, Entry
    from outpace.server.start import EngineHandle


@add_flags(ServerOptions, "server")
class ServerFlags(FlagGroup):
    """Flags of the server as a whole."""

    def collect_settings(self) -> dict[str, Any]:
        """Return the flags that are set, as in a settings file."""
        values = {n: str(v) if isinstance(v, Path) else v for n, v in vars(self).items()}
        return {n: v for n, v in values.items() if v is not None and v is not False}


@add_flags(ServeOptions, "serving")
class ServeFlags(FlagGroup):
    """Flags of how the models of the command line are served."""


SERVER_FLAGS = ServerFlags()
SERVE_FLAGS = ServeFlags()


def serve(
    context: Context,
    model: Annotated[
        str | None,
        Argument(help="Folder, GGUF file, hub name (ORG/REPO:QUANT), or embedded model."),
    ] = None,
    method: MethodFlag = None,
    models: Annotated[
        list[str] | None, Option("--model", help="Model, as name=path or path; may be repeated.")
    ] = None,
    further: Annotated[
        list[str] | None, Option(help="Further model for a role, as name=path; may be repeated.")
    ] = None,
    adapters: Annotated[
        list[str] | None,
        Option(help="Adapter that requests select, as name=path; may be repeated."),
    ] = None,
    config: Annotated[Path | None, Option(help="TOML file of the server and its models.")] = None,
    serve_flags: ServeFlags = SERVE_FLAGS,
    server_flags: ServerFlags = SERVER_FLAGS,
    replicas: Annotated[int | None, Option(help="Number of processes on Ray, one per GPU.")] = None,
    max_replicas: Annotated[int | None, Option(help="Maximum replicas under load.")] = None,
    load_flags: LoadFlags = LOAD_FLAGS,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API; by default the embedded models."""
    if not hasattr(signal, "pthread_sigmask"):  # which an orderly shutdown needs
        raise ValueError("outpace serve needs Linux or macOS; on Windows, use WSL")
    try:
        from outpace.server import run, settings
        from outpace.server.logs import start_log
        from outpace.server.models import check_all_models, use_default_draft
        from outpace.server.settings import name_models
        from outpace.server.start import bind_socket
    except ImportError as error:
        raise ValueError(f"{error}; serving {install_extra('serve')}") from error
    if max_replicas is not None and replicas is None:
        raise OptionError("max_replicas", max_replicas, "needs --replicas")
    paths = name_models(model, models or ())
    if config is not None and paths:
        raise ValueError("models cannot be given both on the command line and in --config")
    changed = serve_flags != SERVE_FLAGS or load_flags != LOAD_FLAGS
    if not paths and (method or further or adapters or changed):
        flags = "--method, --further, --adapters, --max-tokens, --lazy, --keep, --tools"
        raise ValueError(f"{flags} and loading flags need a model")
    own = {"adapters": parse_pairs(adapters) or None, **vars(serve_flags), **vars(load_flags)}
    entries = {
        name: settings.make_entry(path, method, parse_pairs(further), own)
        for name, path in paths.items()
    }
    whole = settings.build_config(config, entries, server_flags.collect_settings())
    start_log(verbose=whole.server.verbose, log_format=whole.server.log_format)
    whole.check_consistency()
    for entry in whole.models.values():
        fetch_model(entry.path)
    served = {name: use_default_draft(name, entry) for name, entry in whole.models.items()}
    whole = replace(whole, models=served)
    check_all_models(served)
    if replicas is not None:
        raise Exit(serve_replicas(whole, replicas, max_replicas))
    if context.obj is not None:
        listener, engine = context.obj
        raise Exit(run.serve_until_signal(load_service(whole, engine), listener))
    with bind_socket(whole.server) as listener:
        raise Exit(run.serve_until_signal(load_service(whole), listener))


def load_service(config: Config, engine: EngineHandle | None = None) -> Service:
    """Load all models and return their server."""
    import torch

    from outpace.server.service import Service

    small = are_small(config.models)
    if all(entry.tensor_parallel == 1 for entry in config.models.values()):
        return Service.start_engine_process(config, engine, small=small)
    if small:
        torch.set_num_threads(1)  # before layouts are tried
    return Service.load(config)  # torchrun started the processes


def serve_replicas(config: Config, replicas: int, max_replicas: int | None) -> int:
    """Serve with several processes, and return the exit status."""
    try:
        from outpace.ray.run import run_replicas
    except ImportError as error:
        raise ValueError(f"{error}; --replicas {install_extra('ray')}") from error
    return run_replicas(config, replicas, max_replicas, small=are_small(config.models))


def are_small(models: Mapping[str, Entry]) -> bool:
    """Return whether one thread is fastest for all models; raises `ValueError` for a bad one."""
    from outpace.server.models import name_errors

    small = True
    for name, entry in models.items():
        with name_errors(name):
            small &= uses_one_thread(entry.path, entry.device)
    return small


def parse_pairs(texts: Iterable[str] | None) -> dict[str, str]:
    """Parse names and paths of models or adapters; the last path of a name counts."""
    pairs = {}
    for text in texts or ():
        name, _, pairs[name] = text.partition("=")
        if not (name and pairs[name]):
            raise ValueError(f"{text!r} is not a model: write name=path")
    return pairs
