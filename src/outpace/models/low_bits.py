"""Quantization of a model's matrices, by device, and its implementation on a GPU.

`int8` and `int4` implement it on a CPU. On a GPU, torchao provides the products, and only
projections of layers are quantized: those of attention, MLPs and experts. The embedding, the head,
routers and the fusion of draft features stay in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from outpace.errors import OptionError, install_extra
from outpace.kernels.packed import PACKED_BLOCK, pack_blocks, quantize_blocks
from outpace.models.int8 import QUANTIZABLE_MODULES, has_int8_products, quantize_module
from outpace.models.packed import has_packed_products, pack_module
from outpace.models.transformer import Stack

NATIVE = "native"
"""Keep each matrix in the format of its file."""

QUANTIZE_KINDS: dict[str, tuple[str, ...]] = {
    "cpu": (NATIVE, "int8", "int4"),
    "cuda": ("fp8", "int8", "int4"),
}
"""Supported values of `quantize`, by device."""

MIN_COMPUTE_CAPABILITY = {"fp8": (8, 9), "int4": (8, 0)}
"""Minimum compute capability of a GPU."""

INT4_GROUP_SIZE = 64
"""Elements of an int4 row that share a scale."""

SHAPE_MULTIPLES = {"fp8": (16, 16), "int8": (1, 1), "int4": (1, INT4_GROUP_SIZE)}
"""Required divisors of outputs and inputs; torchao skips other matrices."""


Quantizer = Callable[[nn.Module], nn.Module]
"""Returns a module with a quantized matrix in place of another, or that module unchanged."""


def check_quantize(quantize: str | None, device: torch.device | str, dtype: torch.dtype) -> None:
    """Raise `OptionError` for an unknown `quantize`, or an unsupported device or dtype."""
    if quantize is None:
        return
    if quantize not in (allowed := (NATIVE, *QUANTIZE_KINDS["cuda"])):
        raise OptionError("quantize", quantize, f"must be one of {', '.join(allowed)}")
    device = torch.device(device)
    if quantize not in QUANTIZE_KINDS.get(device.type, ()):
        fit = ", ".join(f"{' or '.join(kinds)} on {name}" for name, kinds in QUANTIZE_KINDS.items())
        raise OptionError(
            "quantize", quantize, f"{quantize!r} cannot run on {device.type}: omit it, or use {fit}"
        )
    if device.type == "cuda":
        check_quantize_gpu(quantize, device, dtype)


def default_quantize(
    quantize: str | None, dtype: object, device: torch.device, processes: int
) -> str | None:
    """Return the effective `quantize`: the format of the file by default on a CPU."""
    # A given `dtype` requests unquantized matrices. Only a CPU in one process multiplies stored
    # formats.
    fits = device.type == "cpu" and processes == 1
    return NATIVE if quantize is None and dtype is None and fits else quantize


def check_quantize_gpu(quantize: str, device: torch.device, dtype: torch.dtype) -> None:
    if torch.version.hip is not None:
        raise OptionError("quantize", quantize, f"{quantize!r} cannot run on ROCm: omit it")
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise OptionError(
            "quantize", quantize, f"{quantize!r} on a GPU requires bfloat16, got {name}; omit dtype"
        )
    least, found = (
        MIN_COMPUTE_CAPABILITY.get(quantize, (0, 0)),
        torch.cuda.get_device_capability(device),
    )
    if found < least:
        raise OptionError(
            "quantize",
            quantize,
            f"{quantize!r} requires compute capability {'{}.{}'.format(*least)}, but {device} has "
            f"{'{}.{}'.format(*found)}; use quantize='int8', or omit it",
        )
    torchao_config(quantize)


def torchao_config(quantize: str) -> Any:
    try:
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int4WeightOnlyConfig,
            Int8WeightOnlyConfig,
            PerRow,
        )
    except ImportError as error:
        raise OptionError(
            "quantize", quantize, f"{quantize!r} on a GPU {install_extra('quantize')} ({error})"
        ) from error
    # torchao's inductor settings would apply to the whole process.
    match quantize:
        case "fp8":
            # Activations have a scale per row, so that results are batch-invariant.
            return Float8DynamicActivationFloat8WeightConfig(
                granularity=PerRow(), set_inductor_config=False
            )
        case "int8":
            return Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False, version=2)
    # PyTorch includes the products of this format; the default needs another package.
    return Int4WeightOnlyConfig(
        group_size=INT4_GROUP_SIZE,
        int4_packing_format="tile_packed_to_4d",
        set_inductor_config=False,
    )


def layer_projections(model: Stack) -> dict[nn.Module, str]:
    """Return the matrices of layers that a GPU quantizes, with their names."""
    return {
        module: name
        for name, module in model.blocks.named_modules(prefix="blocks")
        if isinstance(module, nn.Linear) and not name.endswith(".router")
    }


def build_quantizer(
    model: Stack, quantize: str | None, device: torch.device | str
) -> Quantizer | None:
    """Return a function that quantizes a projection on a GPU and leaves other modules unchanged.

    It is called once a module has its weight. None if nothing is quantized.
    """
    if quantize is None or torch.device(device).type != "cuda":
        return None
    chosen, options = layer_projections(model), torchao_config(quantize)
    for module, name in chosen.items():
        out, width = module.get_parameter("weight").shape
        if out % SHAPE_MULTIPLES[quantize][0] or width % SHAPE_MULTIPLES[quantize][1]:
            raise OptionError(
                "quantize",
                quantize,
                f"{quantize!r} requires multiples of "
                f"{' and of '.join(map(str, SHAPE_MULTIPLES[quantize]))}, but {name} has {out} "
                f"outputs of {width} inputs; use quantize='int8'",
            )
    from torchao.quantization import quantize_

    def quantize_projection(module: nn.Module) -> nn.Module:
        if module in chosen:
            quantize_(module, options)
            if type(module.weight) is nn.Parameter:
                raise OptionError(
                    "quantize", quantize, f"torchao skipped {chosen[module]}: omit it"
                )
        return module

    return quantize_projection


def build_cpu_quantizer(model: Stack, quantize: str | None, dtype: torch.dtype) -> Quantizer | None:
    """Return a function that quantizes a module on a CPU, with outputs of `dtype`.

    It is called once a module has its weight. None if nothing is quantized, or if this machine has
    no such products.
    """
    if quantize == "int8" and has_int8_products():
        return partial(quantize_module, dtype=dtype)
    if quantize == "int4" and has_packed_products():
        return build_int4_quantizer(model, dtype)
    return None


def build_int4_quantizer(model: Stack, dtype: torch.dtype) -> Quantizer:
    """Return a function that rounds projections of layers to 4 bits, and other matrices to 8."""
    names = {
        module: name
        for name, module in model.named_modules()
        if type(module) in QUANTIZABLE_MODULES
    }
    projections = layer_projections(model)
    for module, name in names.items():
        out, inputs = module.get_parameter("weight").shape
        if inputs % PACKED_BLOCK:
            raise OptionError(
                "quantize",
                "int4",
                f"{name} has {inputs} inputs, no multiple of {PACKED_BLOCK}: use 'int8'",
            )

    def quantize_matrix(module: nn.Module) -> nn.Module:
        if module not in names:
            return module
        form = "INT4" if module in projections else "Q8_0"
        blocks = quantize_blocks(module.get_parameter("weight").detach(), form)
        if (packed := pack_blocks([blocks], form)) is None:
            raise OptionError(
                "quantize", "int4", f"a scale of {names[module]} exceeds float16: omit it"
            )
        return pack_module(module, packed, dtype)

    return quantize_matrix
