"""What the matrices of a model can be quantised to, by device, and how that is done on a GPU.

On a CPU it is the business of `int8`. On a GPU the products are those of torchao, and only the
projections of layers lose bits: those of attention, of MLPs and of experts. The embedding, the
head, routers, and what takes in the features that a draft reads stay in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outpace.errors import OptionError
from outpace.models.transformer import Stack

NATIVE = "native"
"""Each matrix in the bits that its file has."""

KINDS: dict[str, tuple[str, ...]] = {"cpu": (NATIVE, "int8"), "cuda": ("fp8", "int8", "int4")}
"""What matrices can be quantised to on a device."""

CAPABILITY = {"fp8": (8, 9), "int4": (8, 0)}
"""Least compute capability of a GPU."""

GROUP = 64
"""Numbers of a row of a matrix of 4 bits that share a scale."""

STEPS = {"fp8": (16, 16), "int8": (1, 1), "int4": (1, GROUP)}
"""What outputs and inputs must be multiples of: torchao passes over any other matrix."""


def check(quantize: str | None, device: torch.device | str, dtype: torch.dtype) -> None:
    """Raise `ValueError` for what matrices cannot be quantised to, and where they cannot be."""
    if quantize is None:
        return
    if quantize not in (known := (NATIVE, *KINDS["cuda"])):
        message = f"quantize: unknown quantize {quantize!r}; known are {', '.join(known)}"
        raise OptionError("quantize", quantize, message)
    device = torch.device(device)
    if quantize not in KINDS.get(device.type, ()):
        fit = ", ".join(f"{' or '.join(kinds)} on {name}" for name, kinds in KINDS.items())
        message = f"quantize={quantize!r} is not for {device.type}: leave it out, or {fit}"
        raise OptionError("quantize", quantize, message)
    if device.type == "cuda":
        check_gpu(quantize, device, dtype)


def default_bits(
    quantize: str | None, dtype: object, device: torch.device, processes: int
) -> str | None:
    """What matrices are quantised to: their own bits unless something else is given.

    A given `dtype` asks for plain numbers. Only a CPU in one process multiplies stored bits.
    """
    fits = device.type == "cpu" and processes == 1
    return NATIVE if quantize is None and dtype is None and fits else quantize


def check_gpu(quantize: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `ValueError` where a GPU, a dtype or what is installed does not do."""
    if torch.version.hip is not None:
        message = f"quantize={quantize!r} is not for ROCm: leave it out"
        raise OptionError("quantize", quantize, message)
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        message = f"quantize={quantize!r} on a GPU is for bfloat16, not for {name}: leave dtype out"
        raise OptionError("quantize", quantize, message)
    least, found = CAPABILITY.get(quantize, (0, 0)), torch.cuda.get_device_capability(device)
    if found < least:
        raise OptionError(
            "quantize",
            quantize,
            f"quantize={quantize!r} needs compute capability {'{}.{}'.format(*least)}, and "
            f"{device} has {'{}.{}'.format(*found)}: choose quantize='int8', or leave it out",
        )
    config(quantize)


def config(quantize: str) -> Any:
    """What torchao is told; `ValueError` where it is not installed."""
    try:
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int4WeightOnlyConfig,
            Int8WeightOnlyConfig,
            PerRow,
        )
    except ImportError as error:
        message = f"quantize={quantize!r} on a GPU needs: pip install 'outpace[quantize]' ({error})"
        raise OptionError("quantize", quantize, message) from error
    # What torchao would set for torch.compile is set for the whole process.
    match quantize:
        case "fp8":
            # Rows of a pass have scales of their own as well, so none depends on its company.
            return Float8DynamicActivationFloat8WeightConfig(
                granularity=PerRow(), set_inductor_config=False
            )
        case "int8":
            return Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False, version=2)
    # The one format whose products are PyTorch's own; the default needs another package.
    return Int4WeightOnlyConfig(
        group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def projections(model: Stack) -> dict[nn.Module, str]:
    """The matrices of layers that lose bits on a GPU, and their names."""
    return {
        module: name
        for name, module in model.blocks.named_modules(prefix="blocks")
        if isinstance(module, nn.Linear) and not name.endswith(".router")
    }


def narrowing(
    model: Stack, quantize: str | None, device: torch.device | str
) -> Callable[[nn.Module], None] | None:
    """What takes bits from a projection of a model on a GPU, and leaves other modules alone.

    It is called once a module has its weight. Raises `ValueError` for a matrix of another shape
    than fits, for which no weight is needed.
    """
    if quantize is None or torch.device(device).type != "cuda":
        return None
    chosen, options = projections(model), config(quantize)
    for module, name in chosen.items():
        out, width = module.get_parameter("weight").shape
        if out % STEPS[quantize][0] or width % STEPS[quantize][1]:
            raise OptionError(
                "quantize",
                quantize,
                f"quantize={quantize!r} needs multiples of "
                f"{' and of '.join(map(str, STEPS[quantize]))}, and {name} has {out} outputs of "
                f"{width} inputs: choose quantize='int8'",
            )
    from torchao.quantization import quantize_

    def narrow(module: nn.Module) -> None:
        if module in chosen:
            quantize_(module, options)
            if type(module.weight) is nn.Parameter:
                message = (
                    f"torchao passed over {chosen[module]} for {quantize!r}: leave quantize out"
                )
                raise OptionError("quantize", quantize, f"quantize: {message}")

    return narrow
