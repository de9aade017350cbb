"""What stands before all replicas: keys, bounds, and the way to one of them."""

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

from outpace.ray.affinity import beginning_of
from outpace.server.app import guarded
from outpace.server.exchange import gone
from outpace.server.fault import Fault
from outpace.server.settings import Settings

log = logging.getLogger("outpace.server")

ATTEMPTS = 3
"""Replicas that a request is given to at most, one after the other, where they end under it."""

STATE_SECONDS = 10.0
"""Time of a request without a prompt, so that none waits for a replica that never comes."""

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""All, since it is the replica that refuses."""


def no_replica() -> Fault:
    """What a client is told where nobody can answer."""
    return Fault(503, "no replica can answer now", headers={"Retry-After": "10"})


LOST = Fault(503, "the replica that answered has ended; ask again")


class Front:
    """The application that Ray serves. `replicas` is Ray's handle of them."""

    def __init__(self, settings: Settings, replicas: Any) -> None:
        self.settings = settings
        self.replicas = replicas

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Its routes; Ray asks for them under this name."""
        app = guarded(self.settings, openapi_url=None)
        handle = self.replicas.options(stream=True)

        @app.get("/metrics")
        async def metrics() -> Response:
            """Those of all replicas."""
            try:
                coming = self.replicas.broadcast("metrics")
                told = await coming.results_async(timeout_s=STATE_SECONDS)
            except (RayError, RayServeException, TimeoutError) as error:
                raise no_replica() from error
            return Response(merged(told), media_type="text/plain; version=0.0.4")

        @app.api_route("/{path:path}", methods=METHODS)
        async def passed(request: Request) -> Response:
            """Whatever else it is, a replica answers it."""
            body = await request.body()
            return Passed(handle, beginning_of(body), plain(request.scope), body)

        return app


class Passed(Response):
    """An answer that a replica gives."""

    background = None

    def __init__(self, handle: Any, beginning: str, scope: dict[str, Any], body: bytes) -> None:
        self.handle = handle
        self.beginning = beginning
        self.asked = scope, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on until it ends or its client goes; what cannot be had is a `Fault`."""
        passing = asyncio.ensure_future(self.passed(send))
        watching = asyncio.ensure_future(gone(receive))
        seconds = None if self.beginning else STATE_SECONDS
        tasks = passing, watching
        try:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=first)
            if not done:
                raise no_replica()
            if passing in done:
                passing.result()
        finally:
            passing.cancel()
            watching.cancel()

    async def passed(self, send: Send) -> None:
        """Ask one replica after the other until one has begun to answer.

        What ends in the middle is told by an error event: only a stream has a middle.
        """
        for _ in range(ATTEMPTS):
            message: Message | None = None
            try:
                async for message in self.messages():
                    await send(message)
                return
            except RayActorError as error:
                log.warning("a replica has ended: %s", error)
                if message is not None:
                    if message.get("more_body"):
                        await send({"type": "http.response.body", "body": LOST.event})
                    return
            except BackPressureError as error:
                raise Fault(429, "too many requests wait", headers={"Retry-After": "1"}) from error
            except (RayError, RayServeException) as error:
                log.error("no replica has answered: %s", error)
                raise no_replica() from error
        raise no_replica()

    async def messages(self) -> AsyncIterator[Message]:
        """What one replica answers; its head comes with the first bytes of its body."""
        answer = self.handle.answer.remote(self.beginning, *self.asked)
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


def plain(scope: Scope) -> dict[str, Any]:
    """What of a request an application reads, and another process may have."""
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path")
    return {name: scope[name] for name in (*names, "query_string", "headers") if name in scope}


def merged(told: Iterable[tuple[str, str]]) -> bytes:
    """Metrics of replicas by their names, as one text: each sample has a label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in told:
        for family in text_string_to_metric_families(text):
            new = Metric(family.name, family.documentation, family.type)
            known = families.setdefault(family.name, new)
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                known.add_sample(sample.name, labels, sample.value)
    return generate_latest(Collected(families.values()))


class Collected(Collector):
    """Families of metrics, as the writer of texts takes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self.families
