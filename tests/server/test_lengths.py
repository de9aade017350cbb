"""Length of answers without `max_tokens`: end-of-sequence, or the context length."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from asking import ask, chat, completion, refused, serve_models
from outpace.server.settings import Entry

CONTEXT = 512
"""Context length of every model of the zoo."""


@pytest.mark.parametrize(
    ("model", "prompt", "wanted"),
    [
        ("tiny-ar", 1, CONTEXT - 1),
        ("tiny-ar", 300, CONTEXT - 300),
        ("tiny-dream", 1, 256),
        ("tiny-dream", 300, CONTEXT - 300),
    ],
)
def test_default_length_fills_the_context(
    client: TestClient, model: str, prompt: int, wanted: int
) -> None:
    quick = {"method": "diffusion", "options": {"steps": 4}} if model == "tiny-dream" else {}
    asked = completion([5] * prompt, model=model, ignore_eos=True, outpace=quick)
    answer = ask(client, asked)
    assert answer["usage"]["completion_tokens"] == wanted
    assert answer["choices"][0]["finish_reason"] == "length"


def test_default_length_ends_at_eos(client: TestClient) -> None:
    answer = ask(client, chat(seed=1))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"] == ask(client, chat(seed=1, max_tokens=300))["choices"]


@pytest.fixture(scope="module")
def bounded() -> Iterator[TestClient]:
    """A server with a limit for answers."""
    names = ("tiny-ar", "tiny-dream")
    limited = {name: Entry(path=name, cache_gib=0.05, max_tokens=40) for name in names}
    with serve_models(**limited) as client:
        yield client


@pytest.mark.nightly
def test_operator_limits_answers(bounded: TestClient) -> None:
    for prompt, wanted in ((5, 40), (CONTEXT - 41, 40), (CONTEXT - 39, 39), (CONTEXT - 3, 3)):
        answer = ask(bounded, completion([5] * prompt, ignore_eos=True))
        assert answer["usage"]["completion_tokens"] == wanted
    answer = ask(bounded, completion([5], model="tiny-dream", ignore_eos=True))
    assert answer["usage"]["completion_tokens"] == 40


def test_longer_answers_are_refused(bounded: TestClient) -> None:
    assert ask(bounded, completion(max_tokens=40, min_tokens=40))
    for fields in ({"max_tokens": 41}, {"min_tokens": 41}, {"max_tokens": 50, "min_tokens": 45}):
        assert refused(bounded, completion(**fields))["param"] == min(fields)
    assert refused(bounded, chat(max_completion_tokens=41))["param"] == "max_completion_tokens"
