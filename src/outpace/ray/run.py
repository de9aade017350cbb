"""Replicas from their start to their last request: what `outpace serve --replicas` does."""

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
"""Of the application on Ray."""

STARTS = 3
"""Replicas that may fail to start before all is given up."""


def run(config: Config, replicas: int, most: int | None, *, small: bool) -> int:
    """Serve by so many replicas, up to `most` under load, until a signal; the exit status.

    Raises `ValueError` where they find no room or cannot start.
    """
    settings = config.server
    check(config, replicas, most)
    ended = Event()
    log_start(settings.host, settings.port, len(config.models))
    join()
    try:
        devices = {entry.device for entry in config.models.values()}
        each = share(most or replicas, devices, small=small)
        refuse_other()
        serve.start(http_options={"host": settings.host, "port": settings.port})
        deploy(config, each, replicas, most)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        log_address(settings.host, settings.port)
        ended.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        log.info("draining for %g seconds at most", settings.drain_seconds)
        with suppress(TimeoutError):  # Ray waits for a minute; what is left then ends with it
            serve.delete(NAME)
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def check(config: Config, replicas: int, most: int | None) -> None:
    """Raise `ValueError` for what cannot be, before Ray is started."""
    check_count(replicas)
    if most is not None and most < replicas:
        message = f"max_replicas must be at least {replicas}, as replicas, not {most}"
        raise OptionError("max_replicas", most, message)
    if not config.server.port:
        raise OptionError("port", config.server.port, "port 0 is not known to Ray: name one")
    application(config)
    bound(config.server).close()


def refuse_other() -> None:
    """Raise `ValueError` where Ray serves something already: its address would not be ours."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    raise ValueError(
        "Ray Serve runs on this cluster already, at its own address: "
        "add outpace.ray.replicas.application there by ray.serve.run"
    )


def deploy(config: Config, each: Share, replicas: int, most: int | None) -> None:
    """Start the replicas; `ValueError` with the reason where they cannot."""
    options: dict[str, Any] = {"num_replicas": replicas}
    if most is not None:
        scaling = {"min_replicas": replicas, "max_replicas": most}
        options = {
            "autoscaling_config": {**scaling, "target_ongoing_requests": at_a_time(config) / 2}
        }
    served = application(
        config,
        threads=each.threads,
        ray_actor_options=each.options,
        max_constructor_retry_count=STARTS,
        **options,
    )
    try:
        serve.run(served, name=NAME, route_prefix="/")
    except (RuntimeError, RayError) as error:
        raise ValueError(f"no replica could be started: {error}") from error
