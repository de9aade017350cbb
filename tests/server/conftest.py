"""Fixtures: one in-process server of the zoo per test process, and one of models that think."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from outpace.server.service import Service


@pytest.fixture(scope="session")
def service() -> Service:
    from outpace.server.service import Service
    from outpace.server.settings import Config, zoo_entries

    return Service.load(Config(models=zoo_entries()))


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[TestClient]:
    from asking import connect

    with connect(service) as client:
        yield client


@pytest.fixture(scope="session")
def openai(client: TestClient) -> Any:
    from asking import official_client

    return official_client(client)


@pytest.fixture(scope="session")
def served() -> Iterator[TestClient]:
    """A client of a server of models that think, call tools, or do neither."""
    from asking import serve_models
    from outpace.server.settings import Entry
    from thinking import thinking_model
    from toolbox import tool_model

    with serve_models(
        open=thinking_model("tiny-ar", "open"),
        think=thinking_model("tiny-ar", "think"),
        blocks=thinking_model("tiny-block", "open"),
        tools=tool_model("tiny-ar", "tool_call"),
        array=tool_model("tiny-wedlm", "array"),
        plain=Entry(path="tiny-ar", tools="template"),
    ) as client:
        yield client
