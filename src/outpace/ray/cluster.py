"""The cluster that Ray knows, and what of it each replica has."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import ray

from outpace.errors import OptionError
from outpace.models.device import resolve_device


@dataclass(frozen=True, kw_only=True)
class Share:
    """So many replicas, and what each of them has to itself: `gpus`, else `cpus`."""

    replicas: int
    gpus: int
    cpus: int

    @property
    def threads(self) -> int | None:
        """On which it decodes; None for as many as there are."""
        return None if self.gpus else self.cpus

    @property
    def options(self) -> dict[str, int]:
        """As Ray takes them."""
        return {"num_gpus": self.gpus, "num_cpus": self.cpus}


def check_count(replicas: int | None) -> None:
    """Raise `ValueError` for a number of replicas that no cluster can have."""
    if replicas is not None and replicas < 1:
        raise OptionError("replicas", replicas, f"replicas must be at least 1, not {replicas}")


def join() -> None:
    """Join the cluster of `RAY_ADDRESS` or `ray start`, or else start one on this machine.

    One that is started here tells nobody of it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level=logging.WARNING)


def share(replicas: int | None, devices: set[str | None], *, small: bool) -> Share:
    """What each replica has: a GPU, or cores; one where its models are `small`.

    Without a number there are as many replicas as GPUs, or as cores for small models, else one.
    Raises `ValueError` where the cluster has less than is asked for.
    """
    have = ray.cluster_resources()
    gpus, cpus = int(have.get("GPU", 0)), int(have.get("CPU", 0))
    on_gpu = any(resolve_device(device).type == "cuda" for device in devices)
    most = gpus if on_gpu else cpus
    count = (most if on_gpu or small else 1) if replicas is None else replicas
    if not 1 <= count <= most:
        raise OptionError(
            "replicas",
            count,
            f"replicas must be a number from 1 to {most}, not {count}: each wants a "
            f"{'GPU' if on_gpu else 'core'}, and Ray has {gpus} GPUs and {cpus} cores here",
        )
    return Share(
        replicas=count, gpus=int(on_gpu), cpus=1 if on_gpu or small else max(cpus // count, 1)
    )
