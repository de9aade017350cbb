"""Resources of the Ray cluster, and their share per replica."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import ray

from outpace.errors import must
from outpace.models.device import resolve_device


@dataclass(frozen=True, kw_only=True)
class ReplicaResources:
    """Number of replicas, and the resources of each: `gpus`, or else `cpus`."""

    replicas: int
    gpus: int
    cpus: int

    @property
    def threads(self) -> int | None:
        return None if self.gpus else self.cpus

    @property
    def actor_options(self) -> dict[str, int]:
        return {"num_gpus": self.gpus, "num_cpus": self.cpus}


def check_replica_count(replicas: int | None) -> None:
    if replicas is not None and replicas < 1:
        raise must("replicas", replicas, "be at least 1")


def join_cluster() -> None:
    """Join the cluster of `RAY_ADDRESS` or `ray start`, or start one on this machine.

    Usage statistics are off for a cluster that is started here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level=logging.WARNING)


def allocate_resources(
    replicas: int | None, devices: set[str | None], *, small: bool
) -> ReplicaResources:
    """Return what each replica gets: a GPU, or cores; one core for `small` models.

    Without a number, there is one replica per GPU, or per core for small models, else one.

    Raises:
        OptionError: If the cluster has too few resources.
    """
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    on_gpu = any(resolve_device(device).type == "cuda" for device in devices)
    available = gpus if on_gpu else cpus
    count = (available if on_gpu or small else 1) if replicas is None else replicas
    if not 1 <= count <= available:
        unit = "GPUs" if on_gpu else "cores"
        raise must("replicas", count, f"be from 1 to {available}, the {unit} of the cluster")
    return ReplicaResources(
        replicas=count, gpus=int(on_gpu), cpus=1 if on_gpu or small else max(cpus // count, 1)
    )
