"""The compiled loops of a CPU: products (tiles.c, packed.c) and attention (attend.c)."""

from __future__ import annotations

import logging
from ctypes import CDLL, c_int, c_long, c_void_p
from functools import cache
from importlib.util import find_spec

import torch

LOG = logging.getLogger(__name__)

WORK = 2**18
"""Multiplications that are worth a thread of their own."""


@cache
def library() -> CDLL | None:
    """The library, or None where installing had no C compiler; a line of the log tells that once.

    It uses the threads that PyTorch has.
    """
    spec = find_spec("outpace._compiled")
    if spec is None or spec.origin is None:
        LOG.warning(
            "outpace was installed without a C compiler: its products and attention on a CPU are "
            "PyTorch's, which are slower; install one (gcc), then outpace again"
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
    loaded.outpace_multiply_packed.argtypes = [
        *(c_int, c_void_p, c_int, c_void_p, c_long, c_long, c_long),
        *(c_void_p, c_void_p, c_int),
    ]
    loaded.outpace_attend.argtypes = [c_void_p]
    loaded.outpace_attend.restype = None
    return loaded


def threads(work: int) -> int:
    """How many threads so many multiplications are worth, of those that PyTorch has."""
    return min(torch.get_num_threads(), 1 + work // WORK)
