"""Bytes of a loaded model, from its configuration and the sizes of its files."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from outpace.checkpoints.gguf.file import is_gguf, open_gguf
from outpace.checkpoints.load import (
    CONFIG_FILE,
    load_config,
    open_weights,
    read_published_config,
    resolve_checkpoint,
)
from outpace.checkpoints.quantised import scheme_of
from outpace.decoding.target import DRAFT_KINDS
from outpace.kernels.packed import BLOCK_BYTES, INPUT_MULTIPLES, PACKED_BLOCK
from outpace.models.int8 import QUANTIZABLE_MODULES
from outpace.models.low_bits import NATIVE, layer_projections
from outpace.models.transformer import Transformer

GGUF_HEADS = ("output.weight", "token_embd.weight")
"""Names of the head in a GGUF file; the latter also serves as one if the former is missing."""


def loaded_bytes(name: str, dtype: torch.dtype, quantize: str | None) -> int:
    """Return the bytes of a model's parameters once it is loaded, about those of a draft.

    Args:
        name: Name or path of the model.
        dtype: Type of the parameters that are not quantized.
        quantize: Weight format, or None.

    Raises:
        ValueError: If the configuration is invalid, or a file is missing or cannot be read.
    """
    folder = resolve_checkpoint(name)
    config = load_config(folder)
    with ExitStack() as stack:
        open_weights(folder, config, stack).check_depth(config)
    if config.kind in DRAFT_KINDS:  # its class depends on the target
        return config.num_parameters * dtype.itemsize
    with torch.device("meta"):
        model = Transformer(config)
    if quantize is None:
        return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    kind = "int8" if quantize == "fp8" else quantize
    return quantized_bytes(folder, model, dtype, kind, dense_head=False)


def quantized_bytes(
    folder: Path, target: Transformer, dtype: torch.dtype, quantize: str, *, dense_head: bool
) -> int:
    """Return the bytes of a target's parameters as `load_model` has them under `quantize`.

    Args:
        folder: Folder or GGUF file of the target.
        target: The target, without storage.
        dtype: Type of the parameters that are not quantized.
        quantize: `native`, `int8` or `int4`.
        dense_head: Whether the head is dequantized, because a draft borrows it.
    """
    if quantize != NATIVE:
        return rounded_bytes(target, dtype, quantize, dense_head=dense_head)
    if is_gguf(folder):
        return gguf_bytes(folder, dtype, dense_head=dense_head)
    numbers = sum(parameter.numel() for parameter in target.parameters())
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not files or scheme_of(read_published_config(folder / CONFIG_FILE)) is None:
        return numbers * dtype.itemsize
    head = head_matrix(target).numel() if dense_head else 0
    return files * (numbers - head) // numbers + head * dtype.itemsize


def head_matrix(target: Transformer) -> Tensor:
    head = target.embedding if target.unembedding is None else target.unembedding
    return head.get_parameter("weight")


def gguf_bytes(path: Path, dtype: torch.dtype, *, dense_head: bool) -> int:
    tensors = open_gguf(path).tensors
    head = next(name for name in GGUF_HEADS if name in tensors)
    return sum(
        prod(entry.shape) * dtype.itemsize
        if entry.kind.value not in INPUT_MULTIPLES or (dense_head and name == head)
        else entry.size
        for name, entry in tensors.items()
    )


def rounded_bytes(
    target: Transformer, dtype: torch.dtype, quantize: str, *, dense_head: bool
) -> int:
    """Return the bytes of a target whose matrices are rounded to 8 or 4 bits."""
    projections, head = layer_projections(target), head_matrix(target)
    size = 0
    for module in target.modules():
        for parameter in module.parameters(recurse=False):
            is_matrix = parameter.dim() == 2 and type(module) in QUANTIZABLE_MODULES
            if not is_matrix or (dense_head and parameter is head):
                size += parameter.numel() * dtype.itemsize
            elif quantize == "int8":
                size += parameter.numel() + 4 * len(parameter)
            else:
                kind = "INT4" if module in projections else "Q8_0"
                size += parameter.numel() // PACKED_BLOCK * BLOCK_BYTES[kind]
    return size
