"""Replicas of a server on Ray Serve, with one ingress that routes requests."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import Message, Scope

from outpace.errors import OptionError
from outpace.ray.ingress import Ingress
from outpace.ray.router import AffinityRouter
from outpace.server.app import build_server_app
from outpace.server.logs import start_log
from outpace.server.service import Service
from outpace.server.settings import Config

LOG = logging.getLogger("outpace.server")

MAX_INGRESS_REQUESTS = 2**16
"""Maximum number of concurrent requests in the ingress; waiting ones are limited before."""

INGRESS_GRACE_SECONDS = 5.0
"""Seconds that the ingress outlives the replicas, to report their end to clients."""


class Replica:
    """A whole server without its socket, on `threads` decoding threads (None: the default)."""

    def __init__(self, config: Config, threads: int | None) -> None:
        start_log(verbose=config.server.verbose, log_format=config.server.log_format)
        if threads is not None:
            torch.set_num_threads(threads)  # before weight layouts are benchmarked
        self.name: str = serve.get_replica_context().replica_id.unique_id
        self.service = Service.load(config)
        self.app = build_server_app(self.service)
        self.tasks: set[asyncio.Future[None]] = set()
        gc.collect()
        gc.freeze()  # a collection over all loaded objects would pause every stream

    async def answer(self, beginning: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Answer a request and yield the ASGI messages of the response.

        Args:
            beginning: Routing key, which only the router reads.
            scope: ASGI scope of the request.
            body: Body of the request.
        """
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        received: asyncio.Queue[Message] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": body, "more_body": False})
        task = asyncio.ensure_future(self.app(scope, received.get, sent.put))
        self.tasks.add(task)  # event loops hold only weak references to tasks
        task.add_done_callback(partial(self.finish_response, sent))
        try:
            while message := await sent.get():
                if message["type"] == "http.response.start":
                    header = b"x-outpace-replica", self.name.encode()
                    message = {**message, "headers": [*message["headers"], header]}
                yield message
        finally:
            received.put_nowait({"type": "http.disconnect"})

    def finish_response(
        self, sent: asyncio.Queue[Message | None], task: asyncio.Future[None]
    ) -> None:
        """Mark the end of the response and log an error of the application."""
        self.tasks.discard(task)
        sent.put_nowait(None)
        if error := task.exception():
            LOG.error("a request failed", exc_info=error)

    def metrics(self) -> tuple[str, str]:
        """Return the replica's name, and its metrics in Prometheus' format."""
        return self.name, self.service.metrics.render().decode()

    def check_health(self) -> None:
        """Raise if no request can be answered; Ray then replaces the replica."""
        if failure := self.service.failure:
            raise RuntimeError(failure)


def application(config: Config, *, threads: int | None = None, **options: Any) -> serve.Application:
    """Return a server as an application for `ray.serve.run`.

    Args:
        config: The configuration; paths of models must be valid on every machine.
        threads: Decoding threads of each replica; the default number if None.
        options: Ray's options for the deployment of the replicas, such as `num_replicas`,
            `autoscaling_config` and `ray_actor_options`.

    Raises:
        ValueError: If the configuration is inconsistent, or a model is tensor-parallel.
    """
    config.check_consistency()
    split = [name for name, entry in config.models.items() if entry.tensor_parallel > 1]
    if split:
        message = f"tensor_parallel: must be 1 for {split[0]}, since a replica has one process"
        raise OptionError("tensor_parallel", split, message)
    settings = config.server
    # The ingress checks the key.
    keyless = {"api_key": None, "api_key_file": None, "insecure": True}
    replica_config = config.model_copy(update={"server": settings.model_copy(update=keyless)})
    seconds = settings.drain_seconds
    defaults = {
        "max_ongoing_requests": concurrent_requests(config),
        "max_queued_requests": max(settings.max_waiting, 1),
        "graceful_shutdown_timeout_s": seconds,
        "request_router_config": RequestRouterConfig(request_router_class=AffinityRouter),
    }
    replicas = serve.deployment(Replica, name="replicas").options(**{**defaults, **options})
    ingress = serve.deployment(serve.ingress()(Ingress), name="front").options(
        max_ongoing_requests=MAX_INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=seconds + INGRESS_GRACE_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(settings, replicas.bind(replica_config, threads))


def concurrent_requests(config: Config) -> int:
    """Return how many requests a replica decodes concurrently."""
    return max(entry.max_sequences for entry in config.models.values())
