"""Which back end attends, by device and dtype or as a user says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from outpace.attention.batch import Backend
from outpace.attention.dense import Dense
from outpace.models.config import Sight

LOG = logging.getLogger(__name__)

KNOWN = ("auto", "dense", "triton")
"""Names of back ends; `auto` is `triton` on a GPU and `dense` elsewhere."""


def check(attention: str, device: torch.device) -> None:
    """Raise `ValueError` for a name that is none, and for a kernel that nothing here can run."""
    if attention not in KNOWN:
        raise ValueError(f"unknown attention {attention!r}; known are {', '.join(KNOWN)}")
    if attention == "triton" and (reason := missing(device)):
        raise ValueError(f"attention='triton' cannot be: {reason}; choose 'dense' or 'auto'")


def missing(device: torch.device) -> str | None:
    """What a device lacks to run Triton's kernels; None where it lacks nothing."""
    if find_spec("triton") is None:
        return "the package triton is not installed, which PyTorch for a GPU brings along"
    if device.type == "cuda":
        return None
    from outpace.attention.paged import interpreted  # only now, since it loads Triton

    return None if interpreted else f"it runs on a GPU, not on {device.type}"


def backend(
    attention: str,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    heads: int,
    sights: Sequence[Sight],
    *,
    sinks: bool = False,
    page: int,
    double: bool,
) -> Backend:
    """The back end of a cache; a line of the log says which, and why it is not the kernel.

    Raises `ValueError` where `triton` is asked for and cannot be.
    """
    like = keys[0]
    check(attention, like.device)
    dense = Dense(keys, values, heads, sights, double=double)
    where = f"attention on {like.device.type} in {str(like.dtype).removeprefix('torch.')}"
    if attention == "dense" or attention == "auto" and like.device.type != "cuda":
        LOG.info("%s: dense", where)
        return dense
    reason = missing(like.device)
    if reason is None:
        from outpace.attention.paged import Paged, unfit

        reason = "layers have sinks" if sinks else unfit(like, sights, page, double)
    if reason is None:
        LOG.info("%s: triton", where)
        return Paged(dense, page=page, processors=processors(like.device))
    if attention == "triton":
        raise ValueError(f"attention='triton' cannot be: {reason}; choose 'dense' or 'auto'")
    LOG.warning("%s: dense and not triton, since %s", where, reason)
    return dense


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a few where Triton's interpreter stands in for one."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
