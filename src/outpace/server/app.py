"""The routes of a server."""

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
from outpace.server.reply import dumps
from outpace.server.schema import ChatRequest, CompletionRequest, parse
from outpace.server.service import Service
from outpace.server.settings import Settings
from outpace.version import __version__

log = logging.getLogger("outpace.server")


class Stream(Response):
    """An answer whose text is sent as it comes."""

    background = None

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; what is refused is a `Fault` before the first byte."""
        async with self.exchange.submitted(receive):
            await self.exchange.stream(send)


def guarded(settings: Settings, *, openapi_url: str | None = "/openapi.json") -> FastAPI:
    """An application without routes of its own: keys, bounds, and faults as answers."""
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
    """The application of a server."""
    app = guarded(service.settings)
    add_answers(app, service)
    add_models(app, service)
    add_state(app, service)
    made: list[dict[str, Any]] = []

    def described() -> dict[str, Any]:
        """The document, made when it is first asked for."""
        if not made:
            made.append(document.completed(FastAPI.openapi(app), service.models))
        return made[0]

    app.openapi = described  # type: ignore[method-assign]
    return app


def add_answers(app: FastAPI, service: Service) -> None:
    """The routes that decode."""

    @app.post(
        "/v1/chat/completions",
        response_class=Response,
        responses=document.answers("ChatCompletion"),
        openapi_extra=document.body(ChatRequest),
    )
    async def chat(request: Request) -> Response:
        """The next message of a conversation."""
        return await answer(service, request, parse(ChatRequest, await request.body()))

    @app.post(
        "/v1/completions",
        response_class=Response,
        responses=document.answers("Completion"),
        openapi_extra=document.body(CompletionRequest),
    )
    async def complete(request: Request) -> Response:
        """Text that goes on behind a prompt."""
        return await answer(service, request, parse(CompletionRequest, await request.body()))


async def answer(
    service: Service, request: Request, asked: ChatRequest | CompletionRequest
) -> Response:
    """The answer to a request, whole or as a stream."""
    exchange = Exchange(service, asked)
    if asked.stream:
        return Stream(exchange)
    return Response(await exchange.whole(request.receive), media_type="application/json")


def add_models(app: FastAPI, service: Service) -> None:
    """The routes that list models."""

    @app.get("/v1/models", response_class=Response, responses=told("Models"))
    async def models() -> Response:
        """All models, and the methods that each may be decoded with."""
        return json(service.listed())

    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

    @app.get(
        "/v1/models/{model:path}",
        response_class=Response,
        responses=told("Model") | document.faults(404),
        openapi_extra={"parameters": [name]},
    )
    async def model(request: Request) -> Response:
        """One of them."""
        return json(service.model(request.path_params["model"]).described(service.created))


def add_state(app: FastAPI, service: Service) -> None:
    """The routes that say how the server is."""
    page = Page()

    @app.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def playground() -> Response:
        """The page that shows how methods decode."""
        return page.response()

    @app.get("/health", response_class=Response, responses=told("Status") | document.faults(503))
    async def health() -> Response:
        """Whether the engine lives and is in time."""
        if failure := service.failure:
            raise Fault(503, failure)
        return json({"status": "ok"})

    @app.get("/ready", response_class=Response, responses=told("Status") | document.faults(503))
    async def ready() -> Response:
        """Whether requests are taken."""
        service.check()
        return json({"status": "ready"})

    text: dict[int | str, Any] = {200: {"description": "Metrics.", "content": {"text/plain": {}}}}

    @app.get("/metrics", response_class=Response, responses=text | document.faults())
    async def metrics() -> Response:
        """Everything that is counted, in Prometheus' format."""
        await service.client.measure()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def told(name: str) -> dict[int | str, Any]:
    """An answer that is an object, and errors that come before every route."""
    ok = document.content("application/json", document.schema(name))
    return {200: {"description": "As described.", **ok}, **document.faults()}


def json(value: Any) -> Response:
    """A JSON answer."""
    return Response(dumps(value), media_type="application/json")


async def refused(request: Request, error: Exception) -> Response:
    """A `Fault` as its envelope."""
    assert isinstance(error, Fault)
    return error.response()


async def not_found(request: Request, error: Exception) -> Response:
    """A route that does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:256]
    return Fault(
        error.status_code, f"{request.method} {path}: {error.detail}", headers=error.headers
    ).response()


async def broken(request: Request, error: Exception) -> Response:
    """A fault of our own, whose traceback goes to the log alone."""
    return Fault(500, "the server failed on this request; its log says why").response()
