"""One server as several replicas on Ray Serve: the same application, behind a front that routes."""

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
from outpace.ray.front import Front
from outpace.ray.router import Router
from outpace.server.app import build
from outpace.server.logs import start_log
from outpace.server.service import Service
from outpace.server.settings import Config

log = logging.getLogger("outpace.server")

MOST = 2**16
"""Requests that a front has in hand at most; those that wait for a replica are bounded before."""

GRACE = 5.0
"""Seconds that the front goes on behind the replicas, to tell clients what has ended."""


class Replica:
    """A whole server without its socket, decoding on so many `threads`; all if None."""

    def __init__(self, config: Config, threads: int | None) -> None:
        start_log(verbose=config.server.verbose)
        if threads is not None:
            torch.set_num_threads(threads)  # before layouts are tried
        self.name: str = serve.get_replica_context().replica_id.unique_id
        self.service = Service.load(config)
        self.app = build(self.service)
        self.tasks: set[asyncio.Future[None]] = set()
        gc.collect()
        gc.freeze()  # a collection of all that was loaded would stop every stream

    async def answer(self, beginning: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Answer a request: messages of the application as they come.

        `beginning` is for the router, which has sent it here.
        """
        told: asyncio.Queue[Message | None] = asyncio.Queue()
        asked: asyncio.Queue[Message] = asyncio.Queue()
        asked.put_nowait({"type": "http.request", "body": body, "more_body": False})
        task = asyncio.ensure_future(self.app(scope, asked.get, told.put))
        self.tasks.add(task)  # a loop keeps no task alive by itself
        task.add_done_callback(partial(self.ended, told))
        try:
            while message := await told.get():
                if message["type"] == "http.response.start":
                    own = b"x-outpace-replica", self.name.encode()
                    message = {**message, "headers": [*message["headers"], own]}
                yield message
        finally:
            asked.put_nowait({"type": "http.disconnect"})

    def ended(self, told: asyncio.Queue[Message | None], task: asyncio.Future[None]) -> None:
        """The application has told all that it will."""
        self.tasks.discard(task)
        told.put_nowait(None)
        if error := task.exception():
            log.error("a request failed", exc_info=error)

    def metrics(self) -> tuple[str, str]:
        """Its name, and everything that it counts in Prometheus' format."""
        return self.name, self.service.metrics.text().decode()

    def check_health(self) -> None:
        """Raise where no request can be answered any more; Ray then takes another replica."""
        if failure := self.service.failure:
            raise RuntimeError(failure)


def application(config: Config, *, threads: int | None = None, **options: Any) -> serve.Application:
    """A server for `ray.serve.run`. `options` are Ray's, of the deployment of the replicas.

    Such are `num_replicas`, `autoscaling_config` and `ray_actor_options`. Each replica has the
    models of `config`, at paths that its machine knows, and decodes on so many `threads`. Raises
    `ValueError` for settings that do not fit together, and for a model that is split.
    """
    config.check()
    split = [name for name, entry in config.models.items() if entry.tensor_parallel > 1]
    if split:
        message = f"tensor_parallel: a replica has one process, but {split[0]} wants more"
        raise OptionError("tensor_parallel", split, message)
    settings = config.server
    keyless = {"api_key": None, "api_key_file": None, "insecure": True}  # the front has the key
    behind = config.model_copy(update={"server": settings.model_copy(update=keyless)})
    seconds = settings.drain_seconds
    usual = {
        "max_ongoing_requests": at_a_time(config),
        "max_queued_requests": max(settings.max_waiting, 1),
        "graceful_shutdown_timeout_s": seconds,
        "request_router_config": RequestRouterConfig(request_router_class=Router),
    }
    replicas = serve.deployment(Replica, name="replicas").options(**{**usual, **options})
    front = serve.deployment(serve.ingress()(Front), name="front").options(
        max_ongoing_requests=MOST,
        graceful_shutdown_timeout_s=seconds + GRACE,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(settings, replicas.bind(behind, threads))


def at_a_time(config: Config) -> int:
    """Requests that a replica decodes at a time; more wait in front of all of them."""
    return max(entry.max_sequences for entry in config.models.values())
