"""The OpenAPI document."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from outpace.server.app import build_server_app
from outpace.server.document import REQUEST_MODELS
from outpace.server.service import Service
from outpace.server.settings import Config, Settings, zoo_entries

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


def test_document_names_every_route_and_field(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for kind in REQUEST_MODELS:
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                if status != "200":
                    assert answer["content"]["application/json"]["schema"]["$ref"].endswith("Error")
            assert "422" not in operation["responses"], path


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_document_matches_server() -> None:
    models = {
        name: entry.model_copy(update={"max_tokens": 4}) for name, entry in zoo_entries().items()
    }
    service = Service.load(Config(models=models, server=Settings(insecure=True)))
    document = schemathesis.openapi.from_asgi("/openapi.json", build_server_app(service))
    count = 0
    for result in document.get_all_operations():
        operation = result.ok()
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
        for mode in modes if operation.body else modes[:1]:

            @settings(max_examples=300, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def hold(case: Any) -> None:
                nonlocal count
                count += 1
                case.call_and_validate(checks=CHECKS)

            hold()
    assert count > 1000
