"""Which replica answers a prompt: the choice alone, without Ray."""

import json
from collections import Counter
from typing import Any

import pytest

from outpace.ray.affinity import PREFIX_LENGTH, rank_replicas, replica_ranks, routing_key

LONG = "x" * PREFIX_LENGTH
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "One?"}]
NAMES = ["a", "b", "c", "d", "e"]
WORDS = [f"beginning {n}" for n in range(1000)]


def word(**body: Any) -> str:
    """Of a request as it comes."""
    return routing_key(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"prompt": LONG + "one"}, {"prompt": LONG + "two", "max_tokens": 5}),
        ({"prompt": LONG + "one"}, {"prompt": [LONG, "another one"]}),
        ({"prompt": [7] * 300}, {"prompt": [7] * 299 + [8]}),
        ({"prompt": [7] * 300}, {"prompt": [[7] * 256, [8]]}),
        ({"messages": CHAT}, {"messages": [CHAT[0], {"role": "user", "content": "Two?"}]}),
        (
            {"messages": CHAT},
            {"messages": [{"role": "system", "content": [{"type": "text", "text": LONG}]}]},
        ),
    ],
)
def test_what_begins_alike_has_one_word(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert word(model="m", **one) == word(model="m", **two) != ""
    assert word(model="m", **one) != word(model="n", **one)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"prompt"', b"{}", b'{"prompt": null}', b"\xff", b"[" * 10**5],
)
def test_what_is_no_request_has_none(body: bytes) -> None:
    assert routing_key(body) == ""


def test_replicas_share_beginnings_evenly() -> None:
    firsts = Counter(rank_replicas(each, NAMES)[0] for each in WORDS)
    assert set(firsts) == set(NAMES) and all(150 < count < 250 for count in firsts.values())
    assert all(rank_replicas(each, NAMES) == rank_replicas(each, NAMES[::-1]) for each in WORDS)


@pytest.mark.parametrize("gone", NAMES)
def test_only_what_was_its_own_moves_when_a_replica_goes(gone: str) -> None:
    left = [name for name in NAMES if name != gone]
    for each in WORDS:
        before = rank_replicas(each, NAMES)
        assert rank_replicas(each, left) == [name for name in before if name != gone]


def test_own_replica_comes_first_until_it_has_far_more() -> None:
    own, second, *others = rank_replicas("w", NAMES)
    idle = dict.fromkeys(NAMES, 0)
    assert replica_ranks("w", idle, slack=3) == [[own], [second], others]
    assert replica_ranks("w", {**idle, own: 3}, slack=3) == [[own], [second], others]
    assert replica_ranks("w", {**idle, own: 4}, slack=3) == [[own, second], others]
    assert replica_ranks("w", {**idle, own: 9, second: 6}, slack=3) == [[own], [second], others]
    assert replica_ranks("w", {own: 99}) == [[own], [], []]
