"""Combined fields: suffixes, prompts in answers, tools, adapters and lazy models."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Event
from typing import Any

import pytest
from starlette.testclient import TestClient

from adapting import write_adapter
from asking import ask, chat, completion, events, route, serve_models
from middles import middle_model
from outpace.checkpoints.load import load_config
from outpace.server.settings import Entry
from server.test_hostile import VALUES, attack
from thinking import thinking_model
from toolbox import TOOLS, tool_model

pytestmark = pytest.mark.nightly

NEIGHBOUR = completion("Tom has 3 apples.", model="causal", max_tokens=16, seed=5)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
WORD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": WORD}}

Choices = dict[str, list[Any]]
COMMON: Choices = {
    "model": [
        "causal",
        "causal:loud",
        "diffusion",
        "diffusion:calm",
        "coder",
        "block",
        "lazy",
        "open",
    ],
    "max_tokens": [*range(13), 24, 60],
    "temperature": [0, 0.8],
    "seed": [1, 2],
    "n": [None, None, 2],
    "stop": [None, None, "a", ["7", "\n"], " apples", "<tool_call>", "{"],
    "outpace": [None, None, {"trace": True}, {"method": "lookup"}],
}
OF_COMPLETIONS: Choices = {
    "prompt": ["Tom has 3", ["Tom", "Ann has 4 pears."], [[5, 6, 7]], [5], "é😀 3+4=", "x"],
    "suffix": [None, None, "", " apples.", "😀>>7"],
    "echo": [None, True, True, False],
    "logprobs": [None, None, 0, 3],
    "prompt_logprobs": [None, None, None, 0, 2],
}
OF_CHATS: Choices = {
    "tools": [TOOLS, TOOLS, TOOLS[:1], None],
    "tool_choice": [None, "auto", "required", "none", NAMED],
    "parallel_tool_calls": [None, True, False],
    "response_format": [None, None, {"type": "json_object"}, FORMAT],
    "logprobs": [None, True],
    "top_logprobs": [None, None, 2],
    "prompt_logprobs": [None, None, None, 1],
    "max_reasoning_tokens": [None, None, 0, 5],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server with adapters, tools, tokens to fill in the middle, and a lazy model."""
    root = tmp_path_factory.mktemp("adapters")
    adapters = {
        base: {name: str(write_adapter(root / name, load_config(base), size=0.05))}
        for base, name in (("tiny-ar", "loud"), ("tiny-dream", "calm"))
    }
    causal, diffusion = (tool_model(name, "tool_call") for name in ("tiny-ar", "tiny-dream"))
    with serve_models(
        causal=Entry(path=causal, adapters=adapters["tiny-ar"]),
        diffusion=Entry(path=diffusion, adapters=adapters["tiny-dream"]),
        coder=middle_model(),
        block=tool_model("tiny-block", "object"),
        open=thinking_model("tiny-ar", "open"),
        lazy=Entry(path="tiny-aux", lazy=True, keep="1s", cache_gib=0.05),
    ) as client:
        yield client


def draw_request(rng: Random) -> dict[str, Any]:
    """Return a request with random fields, each valid for some model."""
    make, own = rng.choice([(completion, OF_COMPLETIONS), (chat, OF_CHATS)])
    fields = {name: rng.choice(values) for name, values in (COMMON | own).items()}
    return make(**{name: value for name, value in fields.items() if value is not None})


def draw_hostile(rng: Random) -> dict[str, Any]:
    """Return such a request with one or two fields that may be invalid."""
    body = draw_request(rng) | {"stream": rng.random() < 0.3}
    own = OF_CHATS if "messages" in body else OF_COMPLETIONS
    for name in rng.sample([*own, "model", "stop", "max_tokens"], rng.choice([0, 1, 1, 2])):
        body[name] = rng.choice(VALUES)
    if rng.random() < 0.1:
        body["model"] = rng.choice(["causal:", "causal:calm", ":loud", "lazy:loud", "coder:coder"])
    return body


def test_hostile_fields_beside_a_neighbour(client: TestClient) -> None:
    expected, rng, over = ask(client, NEIGHBOUR)["choices"], Random(0), Event()

    def ask_neighbour() -> int:
        rounds = 0
        while not over.is_set() or not rounds:
            assert ask(client, NEIGHBOUR)["choices"] == expected
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as threads:
        neighbour = threads.submit(ask_neighbour)
        try:
            statuses = {attack(client, draw_hostile(rng)) for _ in range(3000)}
        finally:
            over.set()
        assert neighbour.result(60) > 0
    assert statuses == {200, 400, 404}


def join_chunks(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Return a choice of a stream in the form of a whole answer."""
    found: dict[str, Any] = {"text": "", "thought": "", "calls": [], "tokens": [], "finish": None}
    for choice in [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]:
        delta = choice.get("delta", {})
        found["text"] += choice.get("text") or delta.get("content") or ""
        found["thought"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(found["calls"]):
                found["calls"].append([call["function"]["name"], ""])
            found["calls"][call["index"]][1] += call["function"].get("arguments", "")
        scores = choice.get("logprobs") or {}
        found["tokens"] += list_tokens(scores)
        found["finish"] = choice["finish_reason"] or found["finish"]
    return found


def list_tokens(scores: dict[str, Any]) -> list[str]:
    """Return the tokens of the log-probabilities of a completion or a chat."""
    return scores.get("tokens") or [entry["token"] for entry in scores.get("content") or ()]


def describe_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of a whole answer in the form of `join_chunks`."""
    message = choice.get("message", {})
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return {
        "text": choice.get("text") or message.get("content") or "",
        "thought": message.get("reasoning_content") or "",
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "tokens": list_tokens(choice.get("logprobs") or {}),
        "finish": choice["finish_reason"],
    }


@pytest.mark.parametrize("seed", range(5))
def test_streams_equal_wholes(client: TestClient, seed: int) -> None:
    rng, answered = Random(seed), 0
    seen: dict[str, Callable[[dict[str, Any]], bool]] = {
        "echo": lambda body: body.get("echo", False),
        "suffix": lambda body: "suffix" in body,
        "tools": lambda body: "tools" in body,
        "adapter": lambda body: ":" in body["model"],
        "lazy": lambda body: body["model"] == "lazy",
        "thoughts": lambda body: body["model"] == "open",
    }
    while answered < 100:
        body = draw_request(rng)
        body.pop("prompt_logprobs", None)  # has no stream
        whole = client.post(route(body), json=body)
        if whole.status_code != 200:
            streamed = client.post(route(body), json=body | {"stream": True})
            assert (whole.status_code, whole.json()) == (400, streamed.json()), body
            continue
        chunks = events(client, body)
        for choice in whole.json()["choices"]:
            expected = describe_choice(choice)
            assert join_chunks(chunks, choice["index"]) == expected, (body, choice)
        answered += 1
        seen = {name: is_in for name, is_in in seen.items() if not is_in(body)}
    assert not seen
