"""Which replica answers a prompt: the choice alone, without Ray."""

import json
import sys
from collections import Counter
from typing import Any
from unittest.mock import MagicMock

import pytest

with pytest.MonkeyPatch.context() as patch:  # of the router, which is not tested here
    for name in ("ray", "ray.serve", "ray.serve.request_router"):
        patch.setitem(sys.modules, name, MagicMock(RequestRouter=object))
    from outpace.ray.affinity import PREFIX_LENGTH, rank_replicas, replica_ranks, routing_key

LONG = "x" * PREFIX_LENGTH
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "One?"}]
NAMES = ["a", "b", "c", "d", "e"]
WORDS = [f"beginning {n}" for n in range(1000)]


def key_of(**body: Any) -> str:
    return routing_key(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"prompt": LONG + "one"}, {"prompt": LONG + "two", "max_tokens": 5}),
        ({"prompt": LONG + "one"}, {"prompt": [LONG, "another one"]}),
        ({"prompt": [7] * 300}, {"prompt": [7] * 299 + [8]}),
        ({"prompt": [7] * 300}, {"prompt": [[7] * 256, [8]]}),
        ({"messages": CHAT}, {"messages": [CHAT[0], {"role": "user", "content": "Two?"}]}),
        ({"messages": CHAT}, {"messages": [CHAT[0] | {"content": [{"text": LONG}]}]}),
    ],
)
def test_prompts_that_begin_alike_have_one_key(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert key_of(model="m", **one) == key_of(model="m", **two) != ""
    assert key_of(model="m", **one) != key_of(model="n", **one)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b'"prompt"', b"{}", b'{"prompt": null}', b"\xff", b"[" * 10**5]
)
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert routing_key(body) == ""


def test_replicas_share_keys_evenly() -> None:
    firsts = Counter(rank_replicas(each, NAMES)[0] for each in WORDS)
    assert all(150 < count < 250 for count in map(firsts.get, NAMES))
    assert all(rank_replicas(each, NAMES) == rank_replicas(each, NAMES[::-1]) for each in WORDS)


@pytest.mark.parametrize("gone", NAMES)
def test_a_removed_replica_moves_its_own_keys_only(gone: str) -> None:
    left = [name for name in NAMES if name != gone]
    for each in WORDS:
        before = rank_replicas(each, NAMES)
        assert rank_replicas(each, left) == [name for name in before if name != gone]


def test_first_replica_is_avoided_beyond_the_slack() -> None:
    own, second, *others = rank_replicas("w", NAMES)
    idle = dict.fromkeys(NAMES, 0)
    assert replica_ranks("w", idle, slack=3) == [[own], [second], others]
    assert replica_ranks("w", {**idle, own: 3}, slack=3) == [[own], [second], others]
    assert replica_ranks("w", {**idle, own: 4}, slack=3) == [[own, second], others]
    assert replica_ranks("w", {**idle, own: 9, second: 6}, slack=3) == [[own], [second], others]
    assert replica_ranks("w", {own: 99}) == [[own], [], []]
