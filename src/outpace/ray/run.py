"""Lifetime of replicas on Ray, as started by `outpace serve --replicas`."""

from __future__ import annotations

import logging
import signal
from contextlib import suppress
from threading import Event
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from outpace.errors import OptionError
from outpace.ray.cluster import Share, check_count, join, share
from outpace.ray.replicas import application, at_a_time
from outpace.server.logs import log_address, log_start
from outpace.server.run import bound
from outpace.server.settings import Config

log = logging.getLogger("outpace.server")

NAME = "outpace"
"""Name of the application on Ray."""

STARTS = 3
"""Failed starts of a replica before deployment is aborted."""


def run(config: Config, replicas: int, max_replicas: int | None, *, small: bool) -> int:
    """Serve by `replicas` copies, up to `max_replicas` under load, until a signal.

    Returns:
        The exit status.

    Raises:
        ValueError: If the cluster has too few resources, or no replica can start.
    """
    settings = config.server
    check(config, replicas, max_replicas)
    stopped = Event()
    log_start(settings.host, settings.port, len(config.models))
    join()
    try:
        devices = {entry.device for entry in config.models.values()}
        resources = share(max_replicas or replicas, devices, small=small)
        refuse_other()
        serve.start(http_options={"host": settings.host, "port": settings.port})
        deploy(config, resources, replicas, max_replicas)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        log_address(settings.host, settings.port)
        stopped.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        log.info("finishing pending requests within %g seconds", settings.drain_seconds)
        with suppress(TimeoutError):  # Ray waits one minute, then kills the rest
            serve.delete(NAME)
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def check(config: Config, replicas: int, max_replicas: int | None) -> None:
    """Raise `ValueError` for invalid arguments, before Ray is started."""
    check_count(replicas)
    if max_replicas is not None and max_replicas < replicas:
        message = f"max_replicas must be at least replicas={replicas}, got {max_replicas}"
        raise OptionError("max_replicas", max_replicas, message)
    if not config.server.port:
        raise OptionError(
            "port", config.server.port, "port must not be 0 with Ray Serve; choose one"
        )
    application(config)
    bound(config.server).close()


def refuse_other() -> None:
    """Raise `ValueError` if Ray Serve already runs here at another address."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    raise ValueError(
        "Ray Serve is already running on this cluster with its own address: "
        "deploy outpace.ray.replicas.application there with ray.serve.run"
    )


def deploy(config: Config, resources: Share, replicas: int, max_replicas: int | None) -> None:
    """Start the replicas.

    Raises:
        ValueError: If no replica can start, with the reason.
    """
    options: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = {"min_replicas": replicas, "max_replicas": max_replicas}
        options = {
            "autoscaling_config": {**scaling, "target_ongoing_requests": at_a_time(config) / 2}
        }
    server = application(
        config,
        threads=resources.threads,
        ray_actor_options=resources.options,
        max_constructor_retry_count=STARTS,
        **options,
    )
    try:
        serve.run(server, name=NAME, route_prefix="/")
    except (RuntimeError, RayError) as error:
        raise ValueError(f"no replica could be started: {error}") from error
