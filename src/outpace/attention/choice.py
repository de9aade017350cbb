"""Choice of the attention back end by device and dtype, or by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from outpace.attention import compiled
from outpace.attention.batch import Backend
from outpace.attention.dense import DenseAttention
from outpace.errors import OptionError
from outpace.models.config import AttentionWindow

LOG = logging.getLogger(__name__)

BACKEND_NAMES = ("auto", "dense", "compiled", "triton")
"""Names of back ends; `auto` selects `triton` on a GPU and `compiled` on a CPU where available,
else `dense`."""


def check_backend(attention: str, device: torch.device) -> None:
    """Raise `OptionError` for an unknown back end or one that this device cannot run."""
    if attention not in BACKEND_NAMES:
        raise OptionError("attention", attention, f"must be one of {', '.join(BACKEND_NAMES)}")
    lacks = {"compiled": compiled.compiled_missing_reason, "triton": triton_missing_reason}
    if attention in lacks and (reason := lacks[attention](device)):
        raise unavailable_error(attention, reason)


def unavailable_error(attention: str, reason: str) -> OptionError:
    """Return the error for a back end that cannot run here."""
    return OptionError("attention", attention, f"{attention!r} {reason}: use 'dense' or 'auto'")


def triton_missing_reason(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed; it comes with PyTorch for GPUs"
    if device.type == "cuda":
        return None
    from outpace.attention.paged import is_interpreted  # here, because it loads Triton

    return None if is_interpreted else f"it requires a GPU, got {device.type}"


def select_backend(
    attention: str,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    heads: int,
    attention_windows: Sequence[AttentionWindow],
    *,
    page: int,
    dtype: torch.dtype,
    double: bool,
    pad_work: bool = False,
) -> Backend:
    """Create the attention back end of a cache and log which one was selected, and why.

    Args:
        attention: name of a back end, or `auto`.
        keys: `[S, K, D]` per layer.
        values: `[S, K, D]` per layer.
        heads: number of query heads, H.
        attention_windows: what each layer shows of the visible slots.
        page: slots per page.
        dtype: data type of queries and results.
        double: whether to attend in float64.
        pad_work: whether to pad the work of the Triton kernel, so that passes have equal shapes
            (needed for CUDA graphs).
    """
    like = keys[0]
    check_backend(attention, like.device)
    warn_unproven_device(like.device.type)
    dense = DenseAttention(keys, values, heads, attention_windows, dtype=dtype, double=double)
    where = f"attention on {like.device.type} in {str(like.dtype).removeprefix('torch.')}"
    usual = "triton" if like.device.type == "cuda" else "compiled"
    wanted = usual if attention == "auto" else attention
    if pad_work and wanted != "triton":
        raise OptionError("graphs", True, f"needs attention='triton', not {wanted!r}: omit graphs")
    if wanted == "dense":
        LOG.info("%s: dense", where)
        return dense
    if wanted == "compiled":
        reason = compiled.compiled_unfit_reason(like, page, dtype)
    elif (reason := triton_missing_reason(like.device)) is None:
        from outpace.attention.paged import paged_unfit_reason

        reason = paged_unfit_reason(like, page, dtype, double)
    if reason is None:
        LOG.info("%s: %s", where, wanted)
        return build_backend(wanted, dense, page, pad_work)
    # Who names a back end measures it, so another one must not take its place in silence.
    if attention == wanted or pad_work:
        raise unavailable_error(wanted, str(reason))
    LOG.log(
        logging.WARNING if like.device.type == "cuda" else logging.INFO,
        "%s: dense instead of %s because %s",
        *(where, wanted, reason),
    )
    return dense


@cache  # one line for all models of a process
def warn_unproven_device(kind: str) -> None:
    if kind != "cpu":
        LOG.warning(
            "device %s: this code has never run on a GPU; its kernels equal the reference in "
            "Triton's interpreter on a CPU. Compare answers with those of device cpu",
            kind,
        )


def build_backend(name: str, dense: DenseAttention, page: int, pad_work: bool) -> Backend:
    if name == "compiled":
        return compiled.CompiledAttention(dense)
    from outpace.attention.paged import PagedAttention

    device = dense.keys[0].device
    processors = 4  # of Triton's interpreter
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return PagedAttention(dense, page=page, processors=processors, pad_work=pad_work)
