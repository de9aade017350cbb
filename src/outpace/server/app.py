"""HTTP routes of the server."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.server import document
from outpace.server.exchange import Exchange
from outpace.server.fault import Fault
from outpace.server.guard import Guard
from outpace.server.page import Page
from outpace.server.parsing import parse
from outpace.server.reply import dumps
from outpace.server.schema import ChatRequest, CompletionRequest
from outpace.server.service import Service
from outpace.server.settings import Settings
from outpace.version import __version__

log = logging.getLogger("outpace.server")


class Stream(Response):
    """Response that sends server-sent events while the answer is decoded."""

    background = None

    def __init__(self, handler: Exchange) -> None:
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the request, then stream its events. Refusals raise `HttpError` first."""
        async with self.handler.submitted(receive):
            await self.handler.stream(send)


def guarded(settings: Settings, *, openapi_url: str | None = "/openapi.json") -> FastAPI:
    """Return an application without routes: authentication, limits, error responses."""
    app = FastAPI(
        title="outpace", version=__version__, docs_url=None, redoc_url=None, openapi_url=openapi_url
    )
    key = settings.key()
    app.add_middleware(
        Guard,
        key=key,
        local=settings.local and key is None and not settings.insecure,
        read_seconds=settings.read_seconds,
    )
    app.add_exception_handler(Fault, refused)
    app.add_exception_handler(HTTPException, not_found)
    app.add_exception_handler(Exception, broken)
    return app


def build(service: Service) -> FastAPI:
    """Return the application of a server with all routes."""
    app = guarded(service.settings)
    add_answers(app, service)
    add_models(app, service)
    add_state(app, service)
    cached_documents: list[dict[str, Any]] = []

    def described() -> dict[str, Any]:
        if not cached_documents:
            cached_documents.append(document.completed(FastAPI.openapi(app), service.models))
        return cached_documents[0]

    app.openapi = described  # type: ignore[method-assign]
    return app


def add_answers(app: FastAPI, service: Service) -> None:
    """Add the routes that decode."""

    @app.post(
        "/v1/chat/completions",
        response_class=Response,
        responses=document.answers("ChatCompletion"),
        openapi_extra=document.body(ChatRequest),
    )
    async def chat(request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await answer(service, request, parse(ChatRequest, await request.body()))

    @app.post(
        "/v1/completions",
        response_class=Response,
        responses=document.answers("Completion"),
        openapi_extra=document.body(CompletionRequest),
    )
    async def complete(request: Request) -> Response:
        """Generate a continuation of each prompt."""
        return await answer(service, request, parse(CompletionRequest, await request.body()))


async def answer(
    service: Service, request: Request, body: ChatRequest | CompletionRequest
) -> Response:
    """Return the answer to a request, whole or streamed."""
    handler = Exchange(service, body)
    if body.stream:
        return Stream(handler)
    return Response(await handler.whole(request.receive), media_type="application/json")


def add_models(app: FastAPI, service: Service) -> None:
    """Add the routes that list models."""

    @app.get("/v1/models", response_class=Response, responses=told("Models"))
    async def models() -> Response:
        """List all models, with the methods that each supports."""
        return json(service.listed())

    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

    @app.get(
        "/v1/models/{model:path}",
        response_class=Response,
        responses=told("Model") | document.faults(404),
        openapi_extra={"parameters": [name]},
    )
    async def model(request: Request) -> Response:
        """Describe one model."""
        return json(service.model(request.path_params["model"]).described(service.created))


def add_state(app: FastAPI, service: Service) -> None:
    """Add the routes for the playground, health and metrics."""
    page = Page()

    @app.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def playground() -> Response:
        """Return the playground page."""
        return page.response()

    @app.get("/health", response_class=Response, responses=told("Status") | document.faults(503))
    async def health() -> Response:
        """Check that the engine is running and no step takes too long."""
        if failure := service.failure:
            raise Fault(503, failure)
        return json({"status": "ok"})

    @app.get("/ready", response_class=Response, responses=told("Status") | document.faults(503))
    async def ready() -> Response:
        """Check that requests are accepted."""
        service.check()
        return json({"status": "ready"})

    text: dict[int | str, Any] = {200: {"description": "Metrics.", "content": {"text/plain": {}}}}

    @app.get("/metrics", response_class=Response, responses=text | document.faults())
    async def metrics() -> Response:
        """Return all metrics in Prometheus' format."""
        await service.client.measure()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def told(name: str) -> dict[int | str, Any]:
    """Describe a JSON answer and the errors possible on every route, for OpenAPI."""
    ok = document.content("application/json", document.schema(name))
    return {200: {"description": "As described.", **ok}, **document.faults()}


def json(value: Any) -> Response:
    """Return a JSON response."""
    return Response(dumps(value), media_type="application/json")


async def refused(request: Request, error: Exception) -> Response:
    """Return a `HttpError` as an OpenAI error object."""
    assert isinstance(error, Fault)
    return error.response()


async def not_found(request: Request, error: Exception) -> Response:
    """Return the error of an unknown path or unsupported HTTP method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:256]
    return Fault(
        error.status_code, f"{request.method} {path}: {error.detail}", headers=error.headers
    ).response()


async def broken(request: Request, error: Exception) -> Response:
    """Return status 500; only the log contains the traceback."""
    return Fault(500, "internal server error; the server log has the traceback").response()
