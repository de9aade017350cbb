"""How long answers are where nobody sets a length: to the model's own end, or what fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from asking import ask, chat, completion, refused
from outpace.server.app import build
from outpace.server.service import Service
from outpace.server.settings import Config, Entry

CONTEXT = 512
"""Of every model of the zoo."""


@pytest.mark.parametrize(
    ("model", "prompt", "wanted"),
    [
        ("tiny-ar", 1, CONTEXT - 1),
        ("tiny-ar", 300, CONTEXT - 300),
        ("tiny-dream", 1, 256),
        ("tiny-dream", 300, CONTEXT - 300),
    ],
)
def test_answer_without_a_length_is_what_fits(
    client: TestClient, model: str, prompt: int, wanted: int
) -> None:
    """All of the context for a causal model, and the usual canvas for a diffusion model."""
    quick = {"method": "diffusion", "options": {"steps": 4}} if model == "tiny-dream" else {}
    asked = completion([5] * prompt, model=model, ignore_eos=True, outpace=quick)
    answer = ask(client, asked)
    assert answer["usage"]["completion_tokens"] == wanted
    assert answer["choices"][0]["finish_reason"] == "length"


def test_answer_ends_where_the_model_ends_it(client: TestClient) -> None:
    """It is the one that a client gets who allows as much as there is."""
    answer = ask(client, chat(seed=1))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"] == ask(client, chat(seed=1, max_tokens=300))["choices"]


@pytest.fixture(scope="module")
def bounded() -> Iterator[TestClient]:
    """A server whose operator bounds answers."""
    models = {
        name: Entry(path=name, cache_gib=0.05, max_tokens=40) for name in ("tiny-ar", "tiny-dream")
    }
    service = Service.load(Config(models=models))
    with TestClient(build(service), "http://localhost") as client:
        yield client


def test_operator_bounds_answers(bounded: TestClient) -> None:
    """Those with a length and those without; what does not fit any more is shorter."""
    for prompt, wanted in ((5, 40), (CONTEXT - 41, 40), (CONTEXT - 39, 39), (CONTEXT - 3, 3)):
        answer = ask(bounded, completion([5] * prompt, ignore_eos=True))
        assert answer["usage"]["completion_tokens"] == wanted
    answer = ask(bounded, completion([5], model="tiny-dream", ignore_eos=True))
    assert answer["usage"]["completion_tokens"] == 40
    assert ask(bounded, completion(max_tokens=40, min_tokens=40))
    for fields in ({"max_tokens": 41}, {"min_tokens": 41}, {"max_tokens": 50, "min_tokens": 45}):
        error = refused(bounded, completion(**fields))
        assert error["message"] == f"{error['param']}: must be at most 40 on this server"
        assert error["param"] == min(fields)
    assert refused(bounded, chat(max_completion_tokens=41))["param"] == "max_completion_tokens"
