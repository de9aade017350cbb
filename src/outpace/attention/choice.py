"""Which back end attends, by device and dtype or as a user says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from outpace.attention import compiled
from outpace.attention.batch import Backend
from outpace.attention.dense import Dense
from outpace.errors import OptionError
from outpace.models.config import Sight

LOG = logging.getLogger(__name__)

KNOWN = ("auto", "dense", "compiled", "triton")
"""Names of back ends; `auto` is `triton` on a GPU and `compiled` elsewhere, where they can be."""


def check(attention: str, device: torch.device) -> None:
    """Raise `ValueError` for a name that is none, and for what nothing here can run."""
    if attention not in KNOWN:
        message = f"attention: unknown attention {attention!r}; known are {', '.join(KNOWN)}"
        raise OptionError("attention", attention, message)
    lacks = {"compiled": compiled.missing, "triton": missing}
    if attention in lacks and (reason := lacks[attention](device)):
        raise unavailable(attention, reason)


def unavailable(attention: str, reason: str) -> OptionError:
    """The refusal of a back end that cannot run here."""
    message = f"attention={attention!r} cannot be: {reason}; choose 'dense' or 'auto'"
    return OptionError("attention", attention, message)


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
    page: int,
    double: bool,
    filled: bool = False,
) -> Backend:
    """The back end of a cache; a line of the log says which, and why it is not the usual one.

    Work of the kernel is `filled` up where passes are to look alike.

    Raises `ValueError` where one is asked for that cannot be.
    """
    like = keys[0]
    check(attention, like.device)
    dense = Dense(keys, values, heads, sights, double=double)
    where = f"attention on {like.device.type} in {str(like.dtype).removeprefix('torch.')}"
    usual = "triton" if like.device.type == "cuda" else "compiled"
    wanted = usual if attention == "auto" else attention
    if filled and wanted != "triton":
        message = f"graphs want attention='triton', not {wanted!r}: leave them out"
        raise OptionError("graphs", True, message)
    if wanted == "dense":
        LOG.info("%s: dense", where)
        return dense
    if wanted == "compiled":
        reason = compiled.unfit(like, sights, page)
    elif (reason := missing(like.device)) is None:
        from outpace.attention.paged import unfit

        reason = unfit(like, sights, page, double)
    if reason is None:
        LOG.info("%s: %s", where, wanted)
        return made(wanted, dense, page, filled)
    if attention == wanted or filled:
        raise unavailable(wanted, str(reason))
    LOG.log(
        logging.WARNING if like.device.type == "cuda" else logging.INFO,
        "%s: dense and not %s, since %s",
        *(where, wanted, reason),
    )
    return dense


def made(name: str, dense: Dense, page: int, filled: bool) -> Backend:
    """A back end over a cache."""
    if name == "compiled":
        return compiled.Compiled(dense)
    from outpace.attention.paged import Paged

    device = dense.keys[0].device
    return Paged(dense, page=page, processors=processors(device), filled=filled)


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a few where Triton's interpreter stands in for one."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
