"""Ray Serve ingress: authentication, limits, and forwarding to a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outpace.ray.affinity import routing_key
from outpace.server.app import build_guarded_app
from outpace.server.http_error import HttpError
from outpace.server.request_handler import wait_for_disconnect
from outpace.server.settings import Settings

LOG = logging.getLogger("outpace.server")

MAX_ATTEMPTS = 3
"""Maximum number of replicas tried per request, if they fail before answering."""

STATUS_TIMEOUT = 10.0
"""Seconds for requests without a prompt, which must not wait for a missing replica."""

HTTP_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""All methods; the replica rejects unsupported ones."""


def no_replica_error() -> HttpError:
    """Return the error for a request that no replica can answer."""
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
            """Return the metrics of all replicas."""
            try:
                responses = self.replicas.broadcast("metrics")
                texts = await responses.results_async(timeout_s=STATUS_TIMEOUT)
            except (RayError, RayServeException, TimeoutError) as error:
                raise no_replica_error() from error
            return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4")

        @app.api_route("/{path:path}", methods=HTTP_METHODS)
        async def forward(request: Request) -> Response:
            """Forward a request to a replica."""
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
    """Return the entries of a scope that applications read and that can be pickled."""
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
        """Return all families."""
        return self.families
