"""Loading of compiled kernels: products (tiles.c, packed.c), rounding (int4.c), attention."""

from __future__ import annotations

import logging
from ctypes import CDLL, c_int, c_long, c_void_p
from functools import cache
from importlib.util import find_spec

import torch

LOG = logging.getLogger(__name__)

THREAD_WORK = 2**18
"""Multiplications that justify another thread."""


@cache
def load_library() -> CDLL | None:
    """Load the compiled library; return None, with one warning, if it was not built."""
    spec = find_spec("outpace._compiled")
    if spec is None or spec.origin is None:
        LOG.warning(
            "outpace was installed without a C compiler: products and attention on a CPU use "
            "PyTorch, which is slower; install gcc and reinstall outpace"
        )
        return None
    loaded = CDLL(spec.origin)
    loaded.outpace_has_tiles.argtypes = [c_int]
    loaded.outpace_multiply.argtypes = [
        *(c_int, c_void_p, c_long, c_long, c_void_p, c_long),
        *(c_void_p, c_void_p, c_void_p, c_int),
    ]
    loaded.outpace_packed_bytes.argtypes = [c_int, c_long, c_long]
    loaded.outpace_packed_bytes.restype = c_long
    loaded.outpace_pack.argtypes = [c_int, c_void_p, c_long, c_long, c_void_p, c_int]
    loaded.outpace_unpack.argtypes = [
        *(c_int, c_void_p, c_long, c_void_p, c_long, c_void_p, c_int),
    ]
    loaded.outpace_unpack.restype = None
    loaded.outpace_round_int4.argtypes = [c_void_p, c_long, c_void_p, c_int]
    loaded.outpace_round_int4.restype = None
    loaded.outpace_multiply_packed.argtypes = [
        *(c_int, c_void_p, c_int, c_void_p, c_long, c_long, c_long),
        *(c_void_p, c_void_p, c_int),
    ]
    loaded.outpace_attend.argtypes = [c_void_p]
    loaded.outpace_attend.restype = None
    return loaded


def thread_count(work: int) -> int:
    """Return the number of threads for `work` multiplications, at most PyTorch's."""
    return min(torch.get_num_threads(), 1 + work // THREAD_WORK)
