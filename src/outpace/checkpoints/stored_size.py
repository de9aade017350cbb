"""Bytes of a loaded model, from its configuration and the sizes of its files."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from outpace.checkpoints.checkpoint import Checkpoint
from outpace.checkpoints.gguf.file import open_gguf
from outpace.checkpoints.name import is_gguf
from outpace.decoding.target import DRAFT_KINDS
from outpace.kernels.packed import BLOCK_BYTES, INPUT_MULTIPLES, PACKED_BLOCK
from outpace.models.int8 import QUANTIZABLE_MODULES
from outpace.models.low_bits import NATIVE, layer_projections
from outpace.models.transformer import Transformer


def loaded_bytes(name: str, dtype: torch.dtype, quantize: str | None) -> int:
    """Return the bytes of a model's parameters once it is loaded, about those of a draft.

    Args:
        name: Name or path of the model.
        dtype: Type of the parameters that are not quantized.
        quantize: Weight format, or None.
    """
    checkpoint = Checkpoint(name)
    checkpoint.check_weights()
    config = checkpoint.config
    if config.kind in DRAFT_KINDS:  # its class depends on the target
        return config.num_parameters * dtype.itemsize
    with torch.device("meta"):
        model = Transformer(config)
    if quantize is not None and quantize != NATIVE:
        return rounded_bytes(model, dtype, "int8" if quantize == "fp8" else quantize)
    if quantize == NATIVE and is_gguf(checkpoint.path):
        return gguf_bytes(checkpoint.path, dtype)
    files = sum(path.stat().st_size for path in checkpoint.path.glob("*.safetensors"))
    if quantize == NATIVE and files and checkpoint.scheme is not None:
        return files
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def has_quantized_matrices(name: str, quantize: str | None) -> bool:
    """Return whether a model has quantized matrices once it is loaded."""
    if quantize != NATIVE:
        return quantize is not None
    checkpoint = Checkpoint(name)
    if not is_gguf(checkpoint.path):
        return checkpoint.scheme is not None
    tensors = open_gguf(checkpoint.path).tensors.values()
    return any(entry.kind.value in INPUT_MULTIPLES for entry in tensors)


def gguf_bytes(path: Path, dtype: torch.dtype) -> int:
    return sum(
        prod(entry.shape) * dtype.itemsize
        if entry.kind.value not in INPUT_MULTIPLES
        else entry.size
        for entry in open_gguf(path).tensors.values()
    )


def rounded_bytes(target: Transformer, dtype: torch.dtype, quantize: str) -> int:
    """Return the bytes of a target whose matrices are rounded to 8 or 4 bits."""
    projections = layer_projections(target)
    size = 0
    for module in target.modules():
        for parameter in module.parameters(recurse=False):
            is_matrix = parameter.dim() == 2 and type(module) in QUANTIZABLE_MODULES
            if not is_matrix:
                size += parameter.numel() * dtype.itemsize
            elif quantize == "int8":
                size += parameter.numel() + 4 * len(parameter)
            else:
                kind = "INT4" if module in projections else "Q8_0"
                size += parameter.numel() // PACKED_BLOCK * BLOCK_BYTES[kind]
    return size
