"""Token ids of prompts, and text of token ids."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import QUESTION, ask, chat, completion
from outpace import LLM


def post(client: TestClient, route: str, body: Any, status: int = 200) -> dict[str, Any]:
    response = client.post(route, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("body", [chat(max_tokens=1), completion(max_tokens=1)])
def test_tokens_are_those_of_the_prompt(client: TestClient, body: dict[str, Any]) -> None:
    found = post(client, "/tokenize", body)
    llm = LLM("tiny-ar")
    assert found["tokens"] == llm.text.encode(QUESTION)
    assert found["count"] == len(found["tokens"])
    assert found["count"] == ask(client, body)["usage"]["prompt_tokens"]
    assert found["max_model_len"] == 512
    text = post(client, "/detokenize", {"model": "tiny-ar", "tokens": found["tokens"]})
    assert text == {"prompt": QUESTION + "\n"}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "model"),
        ("/tokenize", {"model": "unknown", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"model": "tiny-ar", "prompt": ""}, 400, "prompt"),
        ("/tokenize", {"model": "tiny-ar", "prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {"model": "tiny-ar", "messages": []}, 400, "messages"),
        ("/tokenize", chat(x=1), 400, "x"),
        ("/detokenize", {"model": "tiny-ar"}, 400, "tokens"),
        ("/detokenize", {"model": "unknown", "tokens": [1]}, 404, "model"),
        ("/detokenize", {"model": "tiny-ar", "tokens": []}, 400, "tokens"),
        ("/detokenize", {"model": "tiny-ar", "tokens": [1, 2**30]}, 400, "tokens.1"),
    ],
)
def test_invalid_field_is_named(
    client: TestClient, route: str, body: Any, status: int, param: str
) -> None:
    assert post(client, route, body, status)["error"]["param"] == param
    assert client.post(route, content="{").status_code == 400
