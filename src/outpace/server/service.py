"""State of a running server: models, pending requests, health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Protocol, Self

from outpace.api.engine_client import EngineClient, ModelClient
from outpace.api.engine_thread import EngineThread
from outpace.api.text import Text
from outpace.server.engine_process import EngineProcess, Order
from outpace.server.fault import Fault
from outpace.server.metrics import Metrics
from outpace.server.models import Known, Model, load_all
from outpace.server.settings import Config, Settings


class InHand(Protocol):
    """A request that is not answered yet."""

    def end(self, fault: Fault) -> None:
        """Abort the request with this error."""


class Service:
    """State shared by the routes of one server."""

    def __init__(
        self, models: Mapping[str, Model], client: EngineClient, settings: Settings
    ) -> None:
        self.models = models
        self.client = client
        self.settings = settings
        self.metrics = Metrics(models)
        self.random = Random()  # os.urandom releases the GIL to the engine's thread on each call
        self.created = int(time.time())
        self.exchanges: set[InHand] = set()
        self.draining = False

    @classmethod
    def load(cls, config: Config) -> Self:
        """Load all models in this process and return their server.

        Raises:
            ValueError: If a model cannot be served; the message names it.
        """
        client, loaded = EngineThread(), load_all(config.models)
        for name, (llm, _) in loaded.items():
            client.add(name, llm)
        texts = {name: llm.text for name, (llm, _) in loaded.items()}
        return cls.of(config, client, {name: info for name, (_, info) in loaded.items()}, texts)

    @classmethod
    def apart(cls, config: Config, *, small: bool) -> Self:
        """Load all models in a separate process and return their server.

        HTTP then does not slow the engine down.

        Args:
            config: The configuration of the server.
            small: Whether one thread decodes, which is fastest for small models.

        Raises:
            ValueError: If a model cannot be served; the message names it.
        """
        command = Order(models=config.models, small=small, verbose=config.server.verbose)
        client = EngineProcess(command)
        return cls.of(config, client, client.known, client.texts)

    @classmethod
    def of(
        cls,
        config: Config,
        client: EngineClient,
        model_infos: Mapping[str, Known],
        texts: Mapping[str, Text],
    ) -> Self:
        """Return a server for the models that a client has loaded."""
        models = {}
        for name, entry in config.models.items():
            max_pending = entry.max_sequences + config.server.max_waiting
            engine = ModelClient(client, name, texts[name], max_pending)
            models[name] = Model(
                name=name, entry=entry, engine=engine, text=texts[name], **vars(model_infos[name])
            )
        return cls(models, client, config.server)

    def model(self, name: str) -> Model:
        """Return a model by name.

        Raises:
            HttpError: If the name is unknown.
        """
        if name not in self.models:
            names = ", ".join(self.models)
            message = f"model: unknown model {name[:256]!r}; choose from {names}"
            raise Fault(404, message, param="model", code="model_not_found")
        return self.models[name]

    def listed(self) -> dict[str, Any]:
        """Return all models as `GET /v1/models` lists them."""
        data = [model.described(self.created) for model in self.models.values()]
        return {"object": "list", "data": data}

    @property
    def failure(self) -> str | None:
        """Why the server cannot answer requests any more; None while it can."""
        began = self.client.heartbeat
        if self.client.error is not None or not self.client.alive:
            return "the engine has stopped"
        if began and time.monotonic() - began > self.settings.step_seconds:
            return f"a step of the engine takes more than {self.settings.step_seconds:g} seconds"
        return None

    def check(self) -> None:
        """Raise `HttpError` if no request is accepted."""
        if failure := self.failure:
            raise Fault(503, failure)
        if self.draining:
            raise Fault(503, "the server is shutting down", headers={"Retry-After": "10"})

    def drain(self) -> None:
        """Accept no more requests; pending ones continue."""
        self.draining = True
        for model in self.models.values():
            model.engine.drain()

    async def drained(self) -> None:
        """Wait until no request is pending, up to the last byte sent."""
        while self.exchanges:
            await asyncio.sleep(0.01)

    def end(self, fault: Fault) -> None:
        """Abort all pending requests with this error."""
        for exchange in list(self.exchanges):
            exchange.end(fault)
