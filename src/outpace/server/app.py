"""HTTP routes of the server, and its page."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.server import document, tokens
from outpace.server.guard import GuardMiddleware, parse_request
from outpace.server.http_error import HttpError
from outpace.server.logs import AccessLogMiddleware
from outpace.server.messages import CountTokensRequest, MessagesRequest, MessagesTranslation
from outpace.server.messages import error_response as messages_error_response
from outpace.server.reply import dump_json
from outpace.server.request_handler import RequestHandler
from outpace.server.responses import ResponsesRequest, ResponsesTranslation
from outpace.server.schema import ChatRequest, CompletionRequest
from outpace.server.service import Service
from outpace.server.start import Settings
from outpace.server.writer import Translation
from outpace.version import __version__

LINKED_FILE = re.compile(
    r'<link rel="stylesheet" href="(?P<style>[\w.]+)">|<script src="(?P<script>[\w.]+)"></script>'
)
"""Reference to a file beside the page."""


class PlaygroundPage:
    """The page with its styles and scripts inline, and its headers."""

    def __init__(self) -> None:
        self.folder = files("outpace.server") / "playground"
        self.hashes: dict[str, list[str]] = {"style": [], "script": []}
        self.text = LINKED_FILE.sub(self.embed_file, self.read_file("page.html"))
        self.headers = {
            "Content-Security-Policy": (
                "default-src 'none'; connect-src 'self'; img-src data:; "
                f"script-src {' '.join(self.hashes['script'])}; "
                f"style-src {' '.join(self.hashes['style'])}; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def read_file(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def embed_file(self, reference: re.Match[str]) -> str:
        tag = reference.lastgroup or ""
        content = self.read_file(reference[tag])
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        self.hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{content}</{tag}>"

    def to_response(self) -> Response:
        return Response(self.text, headers=self.headers, media_type="text/html")


MESSAGES_PATH = "/v1/messages"
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"

LOG = logging.getLogger("outpace.server")


class StreamingAnswer(Response):
    """Response that sends server-sent events while the answer is decoded."""

    background = None

    def __init__(
        self,
        handler: RequestHandler,
        convert_faults: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.handler, self.convert_faults = handler, convert_faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the request, then stream its events. Refusals raise `HttpError` first."""
        try:
            with self.convert_faults():
                async with self.handler.submit_choices(receive):
                    await self.handler.send_stream(send)
        except HttpError as fault:
            if not self.handler.writer.streams_refusal(fault):
                raise
            await self.handler.send_refusal(send, fault)


def build_guarded_app(settings: Settings, *, openapi_url: str | None = "/openapi.json") -> FastAPI:
    """Return an application without routes: authentication, limits, error responses."""
    app = FastAPI(
        title="outpace", version=__version__, docs_url=None, redoc_url=None, openapi_url=openapi_url
    )
    key = settings.read_key()
    app.add_middleware(
        GuardMiddleware,
        key=key,
        local=settings.is_local and key is None and not settings.insecure,
        read_seconds=settings.read_seconds,
    )
    app.add_middleware(AccessLogMiddleware)
    app.add_exception_handler(HttpError, error_response)
    app.add_exception_handler(HTTPException, http_error_response)
    app.add_exception_handler(Exception, internal_error_response)
    return app


def build_server_app(service: Service) -> FastAPI:
    """Return the application of a server with all routes."""
    app = build_guarded_app(service.settings)
    add_completion_routes(app, service)
    add_response_routes(app, service)
    add_token_routes(app, service)
    add_model_routes(app, service)
    add_status_routes(app, service)
    cached_documents: list[dict[str, Any]] = []

    def openapi_document() -> dict[str, Any]:
        if not cached_documents:
            cached_documents.append(
                document.complete_document(FastAPI.openapi(app), service.models)
            )
        return cached_documents[0]

    app.openapi = openapi_document  # type: ignore[method-assign]
    return app


def add_completion_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        response_class=Response,
        responses=document.completion_responses(),
        openapi_extra=document.request_body(ChatRequest),
    )
    async def chat(request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await respond(service, request, parse_request(ChatRequest, await request.body()))

    @app.post(
        "/v1/completions",
        response_class=Response,
        responses=document.completion_responses(),
        openapi_extra=document.request_body(CompletionRequest),
    )
    async def complete(request: Request) -> Response:
        """Generate a continuation of each prompt."""
        return await respond(
            service, request, parse_request(CompletionRequest, await request.body())
        )


def add_response_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/responses",
        response_class=Response,
        responses=document.completion_responses(),
        openapi_extra=document.request_body(ResponsesRequest),
    )
    async def responses(request: Request) -> Response:
        """Generate the next items of a conversation, as OpenAI's Responses API."""
        body = parse_request(ResponsesRequest, await request.body())
        translation = ResponsesTranslation(body, service.find_model(body.model))
        return await respond_translated(service, request, translation)

    @app.post(
        MESSAGES_PATH,
        response_class=Response,
        responses=document.completion_responses(error="MessagesError"),
        openapi_extra=document.request_body(MessagesRequest),
    )
    async def messages(request: Request) -> Response:
        """Generate the next message of a conversation, as Anthropic's Messages API."""
        body = parse_request(MessagesRequest, await request.body())
        translation = MessagesTranslation(body, service.find_model(body.model))
        return await respond_translated(service, request, translation)


async def respond_translated(
    service: Service, request: Request, translation: Translation
) -> Response:
    with translation.rename_faults():
        handler = RequestHandler(service, translation.request, translation)
        if translation.request.stream:
            return StreamingAnswer(handler, translation.rename_faults)
        answer = await handler.complete_answer(request.receive)
    return Response(answer, media_type="application/json")


def add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/tokenize",
        response_class=Response,
        responses=document.answer_responses(400, 404, 503),
        openapi_extra=document.request_body(ChatRequest, CompletionRequest),
    )
    async def tokenize(request: Request) -> Response:
        """Return the token ids of the prompt of a chat or a completion."""
        return json_response(await tokens.tokenize(service, await request.body()))

    @app.post(
        COUNT_PATH,
        response_class=Response,
        responses=document.answer_responses(400, 404, 503, error="MessagesError"),
        openapi_extra=document.request_body(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        """Return the number of tokens of a conversation, as Anthropic's Messages API."""
        body = parse_request(CountTokensRequest, await request.body())
        translation = MessagesTranslation(body, service.find_model(body.model))
        return json_response(await tokens.count_tokens(service, translation))

    @app.post(
        "/detokenize",
        response_class=Response,
        responses=document.answer_responses(400, 404),
        openapi_extra=document.request_body(tokens.DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        return json_response(await tokens.detokenize(service, await request.body()))


async def respond(
    service: Service, request: Request, body: ChatRequest | CompletionRequest
) -> Response:
    handler = RequestHandler(service, body)
    if body.stream:
        return StreamingAnswer(handler)
    return Response(await handler.complete_answer(request.receive), media_type="application/json")


def add_model_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_class=Response, responses=document.answer_responses())
    async def models() -> Response:
        """List all models, with the methods that each supports."""
        return json_response(await service.list_models())

    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

    @app.get(
        "/v1/models/{model:path}",
        response_class=Response,
        responses=document.answer_responses(404),
        openapi_extra={"parameters": [name]},
    )
    async def model(request: Request) -> Response:
        """Describe one model."""
        return json_response(await service.describe_model(request.path_params["model"]))


def add_status_routes(app: FastAPI, service: Service) -> None:
    page = PlaygroundPage()

    @app.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def playground() -> Response:
        """Return the playground page."""
        return page.to_response()

    @app.get("/health", response_class=Response, responses=document.answer_responses(503))
    async def health() -> Response:
        """Check that the engine is running and no layer takes too long."""
        if failure := service.failure:
            raise HttpError(503, failure)
        return json_response({"status": "ok"})

    @app.get("/ready", response_class=Response, responses=document.answer_responses(503))
    async def ready() -> Response:
        """Check that requests are accepted."""
        service.check_ready()
        return json_response({"status": "ready"})

    @app.get(
        "/metrics",
        response_class=Response,
        responses=document.answer_responses(media=("text/plain",)),
    )
    async def metrics() -> Response:
        """Return all metrics in Prometheus' format."""
        await service.client.update_stats()
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


def json_response(value: Any) -> Response:
    return Response(dump_json(value), media_type="application/json")


async def error_response(request: Request, error: Exception) -> Response:
    """Return a `HttpError` as the error object of the API."""
    assert isinstance(error, HttpError)
    if request.url.path in (MESSAGES_PATH, COUNT_PATH):
        return messages_error_response(error)
    return error.to_response()


async def http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:256]
    return HttpError(
        error.status_code, f"{request.method} {path}: {error.detail}", headers=error.headers
    ).to_response()


async def internal_error_response(request: Request, error: Exception) -> Response:
    """Return status 500; only the log contains the traceback."""
    return HttpError(500, "internal server error; the server log has the traceback").to_response()
