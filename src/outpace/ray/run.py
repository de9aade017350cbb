"""Lifetime of replicas on Ray, as started by `outpace serve --replicas`."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from threading import Event
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from outpace.errors import OptionError
from outpace.models.device import resolve_device
from outpace.ray.replicas import application, concurrent_requests
from outpace.server.logs import log_address, log_start
from outpace.server.settings import Config
from outpace.server.start import bind_socket

LOG = logging.getLogger("outpace.server")

APPLICATION_NAME = "outpace"
"""Name of the application on Ray."""

MAX_START_ATTEMPTS = 3
"""Failed starts of a replica before deployment is aborted."""


def run_replicas(config: Config, replicas: int, max_replicas: int | None, *, small: bool) -> int:
    """Serve by `replicas` copies, up to `max_replicas` under load, until a signal.

    Returns:
        The exit status.

    Raises:
        ValueError: If the cluster has too few resources, or no replica can start.
    """
    settings = config.server
    check_deployment(config, replicas, max_replicas)
    stopped = Event()
    log_start(settings.host, settings.port)
    join_cluster()
    try:
        gpus, cpus = share_resources(config, max_replicas or replicas, small=small)
        check_serve_not_running()
        serve.start(http_options={"host": settings.host, "port": settings.port})
        options: dict[str, Any] = {
            "threads": None if gpus else cpus,
            "ray_actor_options": {"num_gpus": gpus, "num_cpus": cpus},
        }
        deploy_replicas(config, replicas, max_replicas, options)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        log_address(settings.host, settings.port)
        stopped.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        LOG.info("finishing pending requests within %g seconds", settings.drain_seconds)
        with suppress(TimeoutError):  # Ray waits one minute, then kills the rest
            serve.delete(APPLICATION_NAME)
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def check_deployment(config: Config, replicas: int, max_replicas: int | None) -> None:
    if replicas < 1:
        raise OptionError("replicas", replicas, "must be at least 1")
    if max_replicas is not None and max_replicas < replicas:
        raise OptionError("max_replicas", max_replicas, f"must be at least replicas={replicas}")
    if not config.server.port:
        raise OptionError("port", 0, "must not be 0 with Ray Serve")
    application(config)
    bind_socket(config.server).close()


def check_serve_not_running() -> None:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    raise ValueError(
        "Ray Serve is already running on this cluster with its own address: "
        "deploy outpace.ray.replicas.application there with ray.serve.run"
    )


def join_cluster() -> None:
    """Join the cluster of `RAY_ADDRESS` or `ray start`, or start one on this machine.

    Usage statistics are off for a cluster that is started here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level=logging.WARNING)


def share_resources(config: Config, replicas: int, *, small: bool) -> tuple[int, int]:
    """Return the GPUs and cores of a replica: a GPU, or cores; one core for `small` models.

    Raises:
        OptionError: If the cluster has too few resources.
    """
    resources = ray.cluster_resources()
    devices = {entry.device for entry in config.models.values()}
    on_gpu = any(resolve_device(device).type == "cuda" for device in devices)
    available = int(resources.get("GPU" if on_gpu else "CPU", 0))
    if replicas > available:
        unit = "GPUs" if on_gpu else "cores"
        raise OptionError(
            "replicas", replicas, f"must be from 1 to {available}, the {unit} of the cluster"
        )
    return int(on_gpu), 1 if on_gpu or small else available // replicas


def deploy_replicas(
    config: Config, replicas: int, max_replicas: int | None, options: Mapping[str, Any]
) -> None:
    """Start the replicas.

    Raises:
        ValueError: If no replica can start, with the reason.
    """
    count: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = {
            "min_replicas": replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": concurrent_requests(config) / 2,
        }
        count = {"autoscaling_config": scaling}
    server = application(config, max_constructor_retry_count=MAX_START_ATTEMPTS, **count, **options)
    try:
        serve.run(server, name=APPLICATION_NAME, route_prefix="/")
    except (RuntimeError, RayError) as error:
        raise ValueError(f"no replica could be started: {error}") from error
