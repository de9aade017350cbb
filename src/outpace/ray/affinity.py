"""Prefix-affinity routing: prompts with the same beginning go to the same replica."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

PREFIX_LENGTH = 256
"""Characters, or token ids, of a prompt that determine its replica."""

MAX_EXTRA_REQUESTS = 8
"""Requests by which a replica's load may exceed its alternative's before it is avoided."""


def routing_key(body: bytes) -> str:
    """Return a hash of the model and the beginning of the first prompt of a request.

    It is empty for a body without a prompt, which any replica may answer or reject.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    prompt = request.get("messages") or request.get("prompt")
    return (
        ""
        if prompt is None
        else stable_digest(f"{request.get('model')!s:.256} {prompt_prefix(prompt)}").hex()
    )


def prompt_prefix(prompt: Any) -> str:
    """Return the beginning of a prompt in any form that requests allow."""
    match prompt:
        case [str() | [*_] as first, *_]:
            prompt = first
    match prompt:
        case str():
            return prompt[:PREFIX_LENGTH]
        case [dict(), *_]:
            return "\n".join(map(message_text, prompt))[:PREFIX_LENGTH]
        case [*ids]:
            return " ".join(str(each) for each in ids[:PREFIX_LENGTH] if isinstance(each, int))
    return ""


def message_text(message: Any) -> str:
    match message:
        case {"role": str(role), "content": str(text)}:
            return f"{role} {text}"
        case {"role": str(role), "content": [*parts]}:
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            return " ".join([role, *(text for text in texts if isinstance(text, str))])
    return ""


def stable_digest(text: str) -> bytes:
    return blake2b(text.encode(errors="replace"), digest_size=16).digest()


def rank_replicas(key: str, names: Sequence[str]) -> list[str]:
    """Return names in a key's order of preference (rendezvous hashing).

    If a replica is removed, only its own keys move; if one is added, keys move only to it.
    """
    return sorted(names, key=lambda name: stable_digest(f"{name} {key}"), reverse=True)


def replica_ranks(
    key: str, loads: Mapping[str, int], slack: int = MAX_EXTRA_REQUESTS
) -> list[list[str]]:
    """Return names in ranks of preference; the least loaded of the first rank is meant.

    A key has a first and a second replica. It goes to the second if the first has more than `slack`
    requests more, and to others if neither has room. Without a key, all are in one rank.

    Args:
        key: Routing key of the request, or "".
        loads: Number of requests of each replica.
        slack: Requests that the first replica may have more than the second.
    """
    if not key:
        return [list(loads)]
    first, *others = rank_replicas(key, list(loads))
    second = others[:1]
    if second and loads[first] > loads[second[0]] + slack:
        return [[first, *second], others[1:]]
    return [[first], second, others[1:]]


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Route requests with the same first argument to the same replica, unless overloaded."""

    def initialize_state(self, slack: int = MAX_EXTRA_REQUESTS) -> None:
        """Store `request_router_kwargs`; see `replica_ranks`."""
        self.slack = slack

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas by rank. Ray queries those of unknown load before it sends."""
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(each.replica_id) or 0
            for name, each in replicas.items()
        }
        args: list[Any] = [] if pending_request is None else pending_request.args
        ranks = replica_ranks(args[0] if args else "", loads, self.slack)
        return [[replicas[name] for name in rank] for rank in ranks if rank]
