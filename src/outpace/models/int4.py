"""Matrices of 4 bits on a CPU, rounded when a model is loaded.

Projections of layers have 4-bit codes, with a float16 scale and a zero point per 32 inputs. The
embedding, the head, routers and the fusion of draft features have 8 bits, with a scale per 32
inputs. A GPU quantizes the same projections (`low_bits.py`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from outpace.errors import OptionError
from outpace.kernels.int4 import pack_blocks, quantize_blocks
from outpace.kernels.packed import PACKED_BLOCK
from outpace.models.int8 import QUANTIZABLE_MODULES, has_int8_products, quantize_module
from outpace.models.low_bits import Quantizer, layer_projections
from outpace.models.packed import has_packed_products, pack_module
from outpace.models.transformer import Stack


def build_cpu_quantizer(model: Stack, quantize: str | None, dtype: torch.dtype) -> Quantizer | None:
    """Return a function that quantizes a module on a CPU, with outputs of `dtype`.

    It is called once a module has its weight. None if nothing is quantized, or if this machine has
    no such products.

    Raises:
        OptionError: if the shape of a matrix is not supported, which is checked without weights.
    """
    if quantize == "int8" and has_int8_products():
        return partial(quantize_module, dtype=dtype)
    if quantize == "int4" and has_packed_products():
        return build_int4_quantizer(model, dtype)
    return None


def build_int4_quantizer(model: Stack, dtype: torch.dtype) -> Quantizer:
    """Return a function that rounds projections of layers to 4 bits, and other matrices to 8.

    Raises:
        OptionError: if the inputs of a matrix are not a multiple of 32.
    """
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
                f"quantize='int4' requires multiples of {PACKED_BLOCK} inputs on a CPU, but {name} "
                f"has {out} outputs of {inputs} inputs; use quantize='int8'",
            )

    def quantize_matrix(module: nn.Module) -> nn.Module:
        if module not in names:
            return module
        form = "INT4" if module in projections else "Q8_0"
        blocks = quantize_blocks(module.get_parameter("weight").detach(), form)
        if (packed := pack_blocks([blocks], form)) is None:
            raise OptionError(
                "quantize",
                "int4",
                f"quantize='int4' needs a scale for {names[module]} that exceeds float16; omit it",
            )
        return pack_module(module, packed, dtype)

    return quantize_matrix
