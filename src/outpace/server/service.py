"""A running server: its models, what is in hand, and whether it is well."""

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
        """Give it up."""


class Service:
    """What the routes of one server share."""

    def __init__(
        self, models: Mapping[str, Model], client: EngineClient, settings: Settings
    ) -> None:
        self.models = models
        self.client = client
        self.settings = settings
        self.metrics = Metrics(models)
        self.random = Random()  # to ask the system each time lets the engine's thread in between
        self.created = int(time.time())
        self.exchanges: set[InHand] = set()
        self.draining = False

    @classmethod
    def load(cls, config: Config) -> Self:
        """A server with all of its models loaded, for one thread to drive.

        Raises `ValueError` that names the model which cannot be served.
        """
        client, loaded = EngineThread(), load_all(config.models)
        for name, (llm, _) in loaded.items():
            client.add(name, llm)
        texts = {name: llm.text for name, (llm, _) in loaded.items()}
        return cls.of(config, client, {name: known for name, (_, known) in loaded.items()}, texts)

    @classmethod
    def apart(cls, config: Config, *, small: bool) -> Self:
        """A server whose models are loaded and decoded by a process of their own.

        So HTTP does not hold the engine up. Where they are `small`, one thread decodes. Raises
        as `load`.
        """
        order = Order(models=config.models, small=small, verbose=config.server.verbose)
        client = EngineProcess(order)
        return cls.of(config, client, client.known, client.texts)

    @classmethod
    def of(
        cls,
        config: Config,
        client: EngineClient,
        known: Mapping[str, Known],
        texts: Mapping[str, Text],
    ) -> Self:
        """A server whose models a client has loaded."""
        models = {}
        for name, entry in config.models.items():
            most = entry.max_sequences + config.server.max_waiting
            engine = ModelClient(client, name, texts[name], most)
            models[name] = Model(
                name=name, entry=entry, engine=engine, text=texts[name], **vars(known[name])
            )
        return cls(models, client, config.server)

    def model(self, name: str) -> Model:
        """A model by its name; `Fault` for an unknown one."""
        if name not in self.models:
            known = ", ".join(self.models)
            message = f"model: there is no model {name[:256]!r}; there are {known}"
            raise Fault(404, message, param="model", code="model_not_found")
        return self.models[name]

    def listed(self) -> dict[str, Any]:
        """All models, as `GET /v1/models` tells them."""
        data = [model.described(self.created) for model in self.models.values()]
        return {"object": "list", "data": data}

    @property
    def failure(self) -> str | None:
        """Why no request can be answered any more; None while all is well."""
        began = self.client.heartbeat
        if self.client.error is not None or not self.client.alive:
            return "the engine has stopped"
        if began and time.monotonic() - began > self.settings.step_seconds:
            return f"a step of the engine takes more than {self.settings.step_seconds:g} seconds"
        return None

    def check(self) -> None:
        """Raise `Fault` where nothing more can be done."""
        if failure := self.failure:
            raise Fault(503, failure)
        if self.draining:
            raise Fault(503, "the server is about to end", headers={"Retry-After": "10"})

    def drain(self) -> None:
        """Take no more requests; those in hand go on."""
        self.draining = True
        for model in self.models.values():
            model.engine.drain()

    async def drained(self) -> None:
        """Wait until no request is in hand, to the last byte that its client takes."""
        while self.exchanges:
            await asyncio.sleep(0.01)

    def end(self, fault: Fault) -> None:
        """Give up all that is in hand."""
        for exchange in list(self.exchanges):
            exchange.end(fault)
