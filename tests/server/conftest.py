"""Fixtures: one in-process server of the zoo per test process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from openai import OpenAI
    from starlette.testclient import TestClient

    from outpace.server.service import Service

URL = "http://localhost"
"""A host that a server without a key accepts."""


@pytest.fixture(scope="session")
def service() -> Service:
    """A service with the models of the zoo."""
    from outpace.server.service import Service
    from outpace.server.settings import Config, zoo_entries

    return Service.load(Config(models=zoo_entries()))


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[TestClient]:
    """An HTTP client of the application; exceptions become responses."""
    from starlette.testclient import TestClient

    from outpace.server.app import build_server_app

    with TestClient(build_server_app(service), URL, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def openai(client: TestClient) -> OpenAI:
    """The official client, connected to the application."""
    from openai import OpenAI

    return OpenAI(base_url=f"{URL}/v1", api_key="none", http_client=client, max_retries=0)
