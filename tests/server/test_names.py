"""Public model names; clients never see a path."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asking import QUESTION, chat, completion, connect, route, serve_models
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.methods import APD, Speculative
from outpace.server.service import Service
from outpace.server.settings import Config, make_entry

SECRET = "very-secret"


def test_models_of_a_method_have_unique_names(tmp_path: Path) -> None:
    for place in "ab":
        (tmp_path / place / "small").mkdir(parents=True)
    mine, other = (str(tmp_path / place / "small") for place in "ab")
    made = make_entry("tiny-ar", Speculative(draft=mine), {"small": other}, {})
    assert made.options["draft"] == "small-2"
    assert made.further == {"small-2": mine, "small": other}
    made = make_entry("tiny-ar", Speculative(draft=mine), {"quick": mine}, {})
    assert made.options["draft"] == "quick"
    assert made.further == {"quick": mine}


@pytest.fixture(scope="module")
def sole() -> Iterator[TestClient]:
    with serve_models(sole="tiny-aux") as client:
        yield client


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Service]]:
    """A server with secret model folders, one of which contains the other's path."""
    place = tmp_path_factory.mktemp(SECRET)
    for name, target in {"own": "tiny-dream", "own-2": "tiny-aux"}.items():
        shutil.copytree(ZOO_FOLDER / target, place / name)
        for path in (ZOO_FOLDER / "vocabulary").iterdir():
            shutil.copy(path, place / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        apd = APD(verifier=str(place / "own-2"))
        entries = {
            "own": make_entry("own", apd, {}, {"cache_gib": 0.05}),
            "here": make_entry("./own-2", None, {}, {"cache_gib": 0.05}),
        }
        service = Service.load(Config(models=entries))
    with connect(service) as client:
        yield client, service


PATHS = {
    "/v1/chat/completions": chat(max_tokens=2),
    "/v1/completions": completion(max_tokens=2),
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": chat(max_tokens=2),
    "/v1/messages/count_tokens": chat(),
    "/tokenize": chat(),
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("path", PATHS)
def test_one_model_answers_to_any_name(sole: TestClient, client: TestClient, path: str) -> None:
    others = {name: each for name, each in PATHS[path].items() if name != "model"}
    for name in ({}, {"model": "gpt-5:x"}, {"model": "sol"}):
        reply = sole.post(path, json=others | name)
        assert reply.status_code == 200, reply.text
        assert reply.json().get("model", "sole") == "sole"
        assert client.post(path, json=others | name).status_code == (404 if name else 400)
    assert sole.post(path, json=others | {"model": "sole:x"}).status_code == 404
    assert sole.get("/v1/models/other").status_code == 404


WRONG: list[dict[str, Any]] = [
    completion([10**6]),
    completion("word " * 600),
    completion(max_tokens=600),
    completion(stop_token_ids=[2**30]),
    completion(structured_outputs={"grammar": 'start: "a"'}),
    completion(structured_outputs={"regex": "(((("}),
    completion("{{8", outpace={"fill": True}),
    completion("a {{8:(}}", outpace={"fill": True}),
    completion(outpace={"method": "nothing"}),
    completion(outpace={"method": "apd", "options": {"verifier": "nothing"}}),
    completion(outpace={"method": "apd", "options": {"verifier": 5}}),
    completion(outpace={"method": "apd", "options": {"window": 0}}),
    completion(outpace={"method": "d2f", "options": {"block": 1000}}),
    completion(outpace={"method": "diffusion", "options": {"steps": 8000}}),
    chat(chat_template_kwargs={"nothing": 1}),
    chat(outpace={"fill": True}),
    {**chat(), "messages": [{"role": "assistant", "content": "x"}] * 2},
]
"""Requests that are rejected, most of them by the model."""


def test_no_client_sees_a_path(hidden: tuple[TestClient, Service]) -> None:
    client, service = hidden
    seen = []
    for model in service.models:
        for body in WRONG:
            asked = {"max_tokens": 4} | body | {"model": model}
            seen.append(client.post(route(asked), content=json.dumps(asked)))
        for stream in (False, True):
            for more in ({}, {"trace": True}):
                asked = chat(QUESTION, max_tokens=8, stream=stream, outpace=more)
                seen.append(client.post(route(asked), json=asked | {"model": model}))
                assert seen[-1].status_code == 200
    for path in ("/", "/v1/models", "/v1/models/own", "/v1/models/x", "/openapi.json", "/metrics"):
        seen.append(client.get(path))
    assert sum(response.status_code == 400 for response in seen) > 1.5 * len(WRONG)
    for response in seen:
        assert SECRET not in response.text and str(ZOO_FOLDER) not in response.text, response.text
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["own", "here"]
    listed = client.get("/v1/models/own").json()["outpace"]["methods"]["apd"]["options"]
    assert next(each for each in listed if each["name"] == "verifier")["choices"] == ["own-2"]
