"""Loading of compiled kernels, and memory for matrices.

Each loop is compiled for several instruction sets, all with the same results (vector.h).
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_int, c_long, c_void_p
from enum import IntEnum
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from threading import local

import torch
from torch import Tensor

HUGE_PAGES = 4 << 20
"""Bytes of memory from which huge pages are requested: twice the size of one on x86."""


def allocate_bytes(size: int) -> Tensor:
    """Return memory `u8[size]` for a matrix, with any content."""
    # A product reads a matrix from its first byte to its last. Linux has huge pages, which need
    # fewer translations of addresses: one row of a model of 1 GB took 0.8 of the time on an AMD
    # EPYC.
    if size < HUGE_PAGES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel may have been built without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


LOG = logging.getLogger(__name__)

THREAD_WORK = 2**18
"""Multiplications that justify another thread."""


class Isa(IntEnum):
    """Instruction sets of compiled loops, numbered as in isa.h."""

    AVX2 = 1
    AVX_VNNI = 2
    AVX512 = 3
    AVX512_VNNI = 4
    AVX512_BF16 = 5
    NEON = 6


@cache
def load_library() -> CDLL | None:
    """Load the compiled library; return None, with one warning, if it was not built."""
    spec = find_spec("outpace._compiled")
    if spec is None or spec.origin is None:
        LOG.warning(
            "outpace was installed without a C compiler: products and attention on a CPU use "
            "PyTorch, which is slower; install gcc or clang, and reinstall outpace"
        )
        return None
    loaded = CDLL(spec.origin)
    loaded.outpace_has_isa.argtypes = [c_int]
    loaded.outpace_multiply.argtypes = [
        *(c_int, c_int, c_void_p, c_long, c_long, c_void_p, c_long),
        *(c_void_p, c_void_p, c_void_p, c_int),
    ]
    loaded.outpace_packed_bytes.argtypes = [c_int, c_long, c_long]
    loaded.outpace_packed_bytes.restype = c_long
    loaded.outpace_pack.argtypes = [c_int, c_void_p, c_long, c_long, c_void_p, c_int]
    loaded.outpace_unpack.argtypes = [*(c_int, c_void_p, c_long, c_void_p, c_long, c_void_p, c_int)]
    loaded.outpace_unpack.restype = None
    loaded.outpace_round_int4.argtypes = [c_void_p, c_long, c_void_p, c_int]
    loaded.outpace_round_int4.restype = None
    loaded.outpace_multiply_packed.argtypes = [
        *(c_int, c_void_p, c_int, c_void_p, c_long, c_long, c_long),
        *(c_void_p, c_void_p, c_int),
    ]
    loaded.outpace_attend.argtypes = [c_void_p]
    loaded.outpace_attend.restype = None
    loaded.outpace_recur.argtypes = [c_void_p]
    loaded.outpace_recur.restype = None
    loaded.outpace_spare_openmp.argtypes = [c_int]
    loaded.outpace_spare_openmp.restype = None
    log_missing_instructions([isa for isa in Isa if loaded.outpace_has_isa(isa)])
    return loaded


def log_missing_instructions(present: Sequence[Isa]) -> None:
    if not present:
        LOG.warning(
            "this processor has neither AVX2 nor Arm's dot products (dotprod): products and "
            "attention on a CPU use PyTorch, which is slower"
        )
    elif not {Isa.AVX512_VNNI, Isa.NEON} & {*present}:
        LOG.info(
            "compiled kernels use %s: this processor has no AVX512-VNNI",
            " and ".join(isa.name.replace("_", "-") for isa in present),
        )


@cache
def library_digest() -> str:
    """Return a digest of the compiled library, on which results depend; empty without one."""
    loaded = load_library()
    return "" if loaded is None else sha256(Path(loaded._name).read_bytes()).hexdigest()


@cache
def has_isa(isa: Isa) -> bool:
    loaded = load_library()
    return loaded is not None and bool(loaded.outpace_has_isa(isa))


class PassThreads(local):
    """Threads of compiled kernels in this thread's pass; 0 outside: as many as PyTorch has."""

    count = 0


PASS = PassThreads()


@contextmanager
def spare_openmp() -> Iterator[None]:
    """Run PyTorch's operators on this thread alone while OpenMP's threads are late (parallel.c)."""
    loaded = load_library()
    assert loaded is not None
    outer = PASS.count
    PASS.count = outer or torch.get_num_threads()
    loaded.outpace_spare_openmp(PASS.count)
    try:
        yield
    finally:
        PASS.count = outer
        loaded.outpace_spare_openmp(outer)


def thread_count(work: int) -> int:
    """Return the number of threads for `work` multiplications, at most those of the pass."""
    return min(PASS.count or torch.get_num_threads(), 1 + work // THREAD_WORK)
