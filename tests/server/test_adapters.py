"""Adapters of a model, which clients select by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from adapting import write_adapter
from asking import ask, chat, completion, refused, serve_models
from outpace import LLM
from outpace.checkpoints.load import load_config
from outpace.cli.serve import parse_pairs
from outpace.server.settings import Entry, make_entry, read_config

NAMES = ["tiny-ar", "tiny-ar:loud", "tiny-ar:calm", "tiny-dream", "tiny-dream:d"]
SHORT = {"max_tokens": 8, "temperature": 0.0, "seed": 1}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Entry]:
    """A causal model with two adapters, and a diffusion model with one."""
    root = tmp_path_factory.mktemp("very-secret")
    adapters = {"tiny-ar": ("loud", "calm"), "tiny-dream": ("d",)}
    return {
        model: Entry(
            path=model,
            cache_gib=0.02,
            methods=["autoregressive", "lookup", "left_to_right"],
            adapters={
                name: str(write_adapter(root / name, load_config(model), seed=seed, size=0.05))
                for seed, name in enumerate(names)
            },
        )
        for model, names in adapters.items()
    }


@pytest.fixture(scope="module")
def client(entries: dict[str, Entry]) -> Iterator[TestClient]:
    with serve_models(**entries) as client:
        yield client


def test_models_and_adapters_are_listed(client: TestClient) -> None:
    listed = client.get("/v1/models")
    assert [each["id"] for each in listed.json()["data"]] == NAMES
    assert "very-secret" not in listed.text
    adapters = [each["outpace"]["adapter"] for each in listed.json()["data"]]
    assert adapters == [None, "loud", "calm", None, "d"]
    assert client.get("/v1/models/tiny-ar:loud").json()["id"] == "tiny-ar:loud"


@pytest.mark.parametrize("model", NAMES)
def test_answer_is_that_of_the_adapter(
    client: TestClient, entries: dict[str, Entry], model: str
) -> None:
    base, _, adapter = model.partition(":")
    path = None if not adapter else (entries[base].adapters or {})[adapter]
    llm = LLM(base, adapter=path, cache_gib=0.02)
    (alone,) = llm.generate("How many?", raw=True, **SHORT)
    found = ask(client, completion("How many?", model=model, **SHORT))
    assert found["choices"][0]["text"] == alone.text and found["model"] == model
    (alone,) = llm.generate("How many?", **SHORT)
    answer = ask(client, chat("How many?", model=model, **SHORT))
    assert answer["choices"][0]["message"]["content"] == alone.text
    assert client.post("/tokenize", json=chat("x", model=model)).json()["count"] > 1


@pytest.mark.parametrize("name", ["tiny-ar:x", "tiny-ar:", ":loud", "tiny-dream:loud", "loud"])
def test_unknown_adapter_is_an_unknown_model(client: TestClient, name: str) -> None:
    error = refused(client, completion(model=name), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found"
    assert refused(client, completion(adapter="loud"))["param"] == "adapter"


def test_metrics_count_requests_of_adapters_apart(client: TestClient) -> None:
    ask(client, completion(model="tiny-ar:calm", **SHORT))
    text = client.get("/metrics").text
    assert 'outpace_requests_total{method="lookup",model="tiny-ar:calm",result="answered"}' in text
    running = [line for line in text.splitlines() if line.startswith("outpace_running{")]
    assert running == [
        'outpace_running{model="tiny-ar"} 0.0',
        'outpace_running{model="tiny-dream"} 0.0',
    ]


def test_adapters_are_configured(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(
        '[models.m]\npath = "tiny-ar"\nadapters = { a = "here", b = "owner/name" }\n'
    )
    config = read_config(tmp_path / "serve.toml")
    assert config.models["m"].adapters == {"a": "here", "b": "owner/name"}
    made = make_entry("tiny-ar", None, {}, {"adapters": parse_pairs([f"a={tmp_path}"])})
    assert made.load_options()["adapters"] == {"a": str(tmp_path)}
