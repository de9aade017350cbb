"""Replicas of a server on Ray Serve, with one ingress that routes requests."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI, Request
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outpace.errors import OptionError
from outpace.ray.affinity import AffinityRouter, routing_key
from outpace.server.app import build_guarded_app, build_server_app
from outpace.server.http_error import HttpError
from outpace.server.logs import start_log
from outpace.server.request_handler import wait_for_disconnect
from outpace.server.service import Service
from outpace.server.settings import Config
from outpace.server.start import Settings

LOG = logging.getLogger("outpace.server")

MAX_ATTEMPTS = 3
"""Maximum number of replicas tried per request, if they fail before answering."""

STATUS_TIMEOUT = 10.0
"""Seconds for requests without a prompt, which must not wait for a missing replica."""

HTTP_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""All methods; the replica rejects unsupported ones."""


def no_replica_error() -> HttpError:
    return HttpError(503, "no replica is available", headers={"Retry-After": "10"})


REPLICA_LOST = HttpError(503, "the replica failed while answering; retry the request")


class Ingress:
    """ASGI application that Ray serves, with Ray's handle of the replicas."""

    def __init__(self, settings: Settings, replicas: Any) -> None:
        self.settings = settings
        self.replicas = replicas

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the application; Ray calls this method by name."""
        app = build_guarded_app(self.settings, openapi_url=None)
        handle = self.replicas.options(stream=True)

        @app.get("/metrics")
        async def metrics() -> Response:
            try:
                responses = self.replicas.broadcast("metrics")
                texts = await responses.results_async(timeout_s=STATUS_TIMEOUT)
            except (RayError, RayServeException, TimeoutError) as error:
                raise no_replica_error() from error
            return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4")

        @app.api_route("/{path:path}", methods=HTTP_METHODS)
        async def forward(request: Request) -> Response:
            body = await request.body()
            return ForwardedResponse(handle, routing_key(body), portable_scope(request.scope), body)

        return app


class ForwardedResponse(Response):
    """The response of a replica."""

    background = None

    def __init__(self, handle: Any, key: str, scope: dict[str, Any], body: bytes) -> None:
        self.handle = handle
        self.key = key
        self.request = scope, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the response until it ends or the client disconnects.

        Raises:
            HttpError: If no replica answers.
        """
        forwarding = asyncio.ensure_future(self.forward_with_retries(send))
        watching = asyncio.ensure_future(wait_for_disconnect(receive))
        seconds = None if self.key else STATUS_TIMEOUT
        tasks = forwarding, watching
        try:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=first)
            if not done:
                raise no_replica_error()
            if forwarding in done:
                forwarding.result()
        finally:
            forwarding.cancel()
            watching.cancel()

    async def forward_with_retries(self, send: Send) -> None:
        """Try replicas until one has begun to answer.

        A failure after that is sent as an error event, since only streams have several messages.
        """
        for _ in range(MAX_ATTEMPTS):
            message: Message | None = None
            try:
                async for message in self.receive_messages():
                    await send(message)
                return
            except RayActorError as error:
                LOG.warning("a replica failed: %s", error)
                if message is not None:
                    if message.get("more_body"):
                        await send({"type": "http.response.body", "body": REPLICA_LOST.event})
                    return
            except BackPressureError as error:
                raise HttpError(
                    429, "too many requests are waiting", headers={"Retry-After": "1"}
                ) from error
            except (RayError, RayServeException) as error:
                LOG.error("no replica answered: %s", error)
                raise no_replica_error() from error
        raise no_replica_error()

    async def receive_messages(self) -> AsyncIterator[Message]:
        """Yield the messages of one replica; the head arrives with the first bytes of the body."""
        answer = self.handle.answer.remote(self.key, *self.request)
        head: Message | None = None
        try:
            async for message in answer:
                if message["type"] == "http.response.start":
                    head = message
                    continue
                if head is not None:
                    yield head
                    head = None
                yield message
        finally:
            answer.cancel()


def portable_scope(scope: Scope) -> dict[str, Any]:
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path")
    return {name: scope[name] for name in (*names, "query_string", "headers") if name in scope}


def merge_metrics(texts: Iterable[tuple[str, str]]) -> bytes:
    """Return the metrics of all replicas as one text, with a label `replica` per sample."""
    families: dict[str, Metric] = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text):
            new = Metric(family.name, family.documentation, family.type)
            target = families.setdefault(family.name, new)
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                target.add_sample(sample.name, labels, sample.value)
    return generate_latest(MetricFamilies(families.values()))


class MetricFamilies(Collector):
    """Prometheus collector of given metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families


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
        self.tasks.discard(task)
        sent.put_nowait(None)
        if error := task.exception():
            LOG.error("a request failed", exc_info=error)

    def metrics(self) -> tuple[str, str]:
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
        raise OptionError(
            "tensor_parallel", split, f"{split[0]} must have 1, since a replica has one process"
        )
    settings = config.server
    # The ingress checks the key.
    keyless = replace(settings, api_key=None, api_key_file=None, insecure=True)
    replica_config = replace(config, server=keyless)
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
    return max(entry.max_sequences for entry in config.models.values())
