"""Set-up of a training run: options, tokenizer, reference models and accelerator."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.field_types import check_names, check_values
from outpace.models.transformer import Stack, Transformer
from outpace.tokenizer import Tokenizer
from outpace.training.loop import Loop
from outpace.training.objective import Objective, ignore_norm_advice
from outpace.training.optim import Optim
from outpace.training.weights import check_trainable


def require_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder; `ValueError` if there is none."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json; set tokenizer to a folder that has one")
    return tokenizer


def check_reference_models(
    objective: Objective, model: Stack, others: Mapping[str, Transformer]
) -> dict[str, Transformer]:
    """Return the reference models."""
    check_trainable(model.config)
    if set(others) != set(objective.roles):
        raise ValueError(
            f"others must be the roles of {type(objective).__name__}: "
            f"{', '.join(objective.roles) or 'none'}; got {', '.join(sorted(others)) or 'none'}"
        )
    return dict(others)


def apply_options(loop: Loop, optim: Optim, options: Mapping[str, Any]) -> tuple[Loop, Optim]:
    check_names("options", options, [*asdict(loop), *asdict(optim)])
    ours, theirs = (
        {name: value for name, value in options.items() if hasattr(part, name)}
        for part in (loop, optim)
    )
    check_values("Loop", Loop, ours)
    check_values("Optim", Optim, theirs)
    return replace(loop, **ours), replace(optim, **theirs)


def create_accelerator(tracker: str | None, out: Path) -> Accelerator:
    """Create the accelerator on the available device, with an optional tracker."""
    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=cpu, kwargs_handlers=[kwargs], log_with=tracker, project_dir=str(out)
    )
    if accelerator.num_processes > 1 and cpu:
        # Threads of several processes would oversubscribe the cores at every operation.
        torch.set_num_threads(1)
    if cpu:
        ignore_norm_advice()
        keep_freed_memory()
    return accelerator


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's `mallopt`."""

MOST_KEPT, LEAST_GROWTH = 2**31 - 1, 2**28
"""Bytes of the heap's end that stay reserved when freed, and those by which it grows."""


def keep_freed_memory() -> None:
    """Let the heap keep freed memory, where the C library can.

    Otherwise glibc maps each large tensor again, and the system clears its pages, which takes a
    tenth of a step.
    """
    if sys.platform == "win32":
        return
    if (set_parameter := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_parameter(M_MMAP_MAX, 0)
        set_parameter(M_TRIM_THRESHOLD, MOST_KEPT)
        set_parameter(M_TOP_PAD, LEAST_GROWTH)
