"""State of a running server: models, pending requests, health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Protocol, Self

from outpace.api.engine_client import EngineClient, ModelClient
from outpace.api.engine_thread import EngineThread
from outpace.api.llm import LLM
from outpace.api.text import TextCodec
from outpace.server.engine_process import EngineProcess, LoadCommand
from outpace.server.http_error import HttpError
from outpace.server.metrics import ServerMetrics
from outpace.server.models import (
    HostedModel,
    ModelInfo,
    describe_models,
    load_all_models,
    load_text,
)
from outpace.server.settings import Config
from outpace.server.start import EngineHandle, Settings


class AbortableRequest(Protocol):
    """A request that is not answered yet."""

    def abort(self, fault: HttpError) -> None:
        """Abort the request with this error."""


class Service:
    """State shared by the routes of one server."""

    def __init__(
        self, models: Mapping[str, HostedModel], client: EngineClient, settings: Settings
    ) -> None:
        self.models = models
        self.client = client
        self.settings = settings
        self.metrics = ServerMetrics(models)
        self.random = Random()  # os.urandom releases the GIL to the engine's thread on each call
        self.created = int(time.time())
        self.pending: set[AbortableRequest] = set()
        self.is_draining = False

    @classmethod
    def load(cls, config: Config) -> Self:
        """Load all models but lazy ones in this process and return their server."""
        client, loaded = EngineThread(), load_all_models(config.models)
        infos = describe_models(config.models)
        texts = {}
        for name, model in loaded.items():
            client.add_model(name, model)
            if isinstance(model, LLM):
                texts[name] = model.text
            else:
                texts[name] = load_text(name, config.models[name])
                texts[name].set_model(infos[name].config)
        return cls.from_client(config, client, infos, texts)

    @classmethod
    def start_engine_process(
        cls, config: Config, handle: EngineHandle | None = None, *, small: bool
    ) -> Self:
        """Load all models but lazy ones in a separate process and return their server."""
        # HTTP then does not slow the engine down.
        command = LoadCommand(
            models=config.models,
            small=small,
            verbose=config.server.verbose,
            log_format=config.server.log_format,
        )
        client = EngineProcess(command, handle)
        return cls.from_client(config, client, client.model_infos, client.texts)

    @classmethod
    def from_client(
        cls,
        config: Config,
        client: EngineClient,
        model_infos: Mapping[str, ModelInfo],
        texts: Mapping[str, TextCodec],
    ) -> Self:
        models: dict[str, HostedModel] = {}
        for name, entry in config.models.items():
            max_pending = entry.max_sequences + config.server.max_waiting
            if (template := texts[name].chat_template) is not None:
                template.needs_description = entry.tools == "template"
            engine = ModelClient(client, name, texts[name], max_pending)
            model = HostedModel(
                name=name, entry=entry, engine=engine, text=texts[name], **vars(model_infos[name])
            )
            models |= model.with_adapters()
        return cls(models, client, config.server)

    def find_model(self, name: str | None) -> HostedModel:
        """Return the model of a name; any other name, or none, is that of a sole model."""
        sole, *others = (model for model in self.models.values() if model.adapter is None)
        # A name that begins as that of an adapter is one, even if it is unknown.
        is_known = name in self.models or (name or "").startswith(f"{sole.name}:")
        if not others and not is_known:
            return sole
        if name is None:
            raise HttpError(
                400, f"model: is required; choose from {', '.join(self.models)}", param="model"
            )
        return self.find_listed_model(name)

    def find_listed_model(self, name: str) -> HostedModel:
        if name not in self.models:
            names = ", ".join(self.models)
            raise HttpError(
                404,
                f"model: unknown model {name[:256]!r}; choose from {names}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    async def list_models(self) -> dict[str, Any]:
        await self.client.update_stats()
        data = [model.describe(self.created) for model in self.models.values()]
        return {"object": "list", "data": data}

    async def describe_model(self, name: str) -> dict[str, Any]:
        """Return a model as `GET /v1/models` lists it; raises `HttpError` for an unknown name."""
        model = self.find_listed_model(name)
        await self.client.update_stats()
        return model.describe(self.created)

    @property
    def failure(self) -> str | None:
        """Why the server cannot answer requests any more; None while it can."""
        reported = self.client.heartbeat
        limit = self.settings.step_seconds * self.client.layer_size
        if self.client.error is not None or not self.client.is_alive:
            return "the engine has stopped"
        if reported and time.monotonic() - reported > limit:
            return f"a layer of a step of the engine takes more than {limit:g} seconds"
        return None

    def check_ready(self) -> None:
        """Raise `HttpError` if no request is accepted."""
        if failure := self.failure:
            raise HttpError(503, failure)
        if self.is_draining:
            raise HttpError(503, "the server is shutting down", headers={"Retry-After": "10"})

    def drain(self) -> None:
        """Accept no more requests; pending ones continue."""
        self.is_draining = True
        for model in self.models.values():
            model.engine.drain()

    async def wait_until_drained(self) -> None:
        """Wait until no request is pending, up to the last byte sent."""
        while self.pending:
            await asyncio.sleep(0.01)

    def abort_pending(self, fault: HttpError) -> None:
        for exchange in list(self.pending):
            exchange.abort(fault)
