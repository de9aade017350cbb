"""Ray Serve's request router with prefix affinity."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from outpace.ray.affinity import MAX_EXTRA_REQUESTS, replica_ranks


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
