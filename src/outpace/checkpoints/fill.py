"""Filling a model's parameters from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.checkpoints.adapter import Adapter
from outpace.checkpoints.families import config_family
from outpace.checkpoints.hub import LOAD_PROGRESS
from outpace.checkpoints.weights import CheckpointWeights, TensorPart, parameter_parts
from outpace.kernels.packed import BLOCK_FORMATS, FOUR_BITS
from outpace.models.draft import Draft
from outpace.models.int8 import QUANTIZABLE_MODULES, has_int8_products, int8_module, is_quantized
from outpace.models.low_bits import NATIVE, Quantizer
from outpace.models.packed import has_packed_products, pack_module
from outpace.models.transformer import Stack

VOCABULARY_TABLES = {"d2t": "I64", "t2d": "BOOL"}
"""Vocabulary tables of a draft, and their types."""

EMBEDDING_CHUNK_ROWS = 2**14
"""Rows of an embedding compared at a time."""

Int8Matrix = tuple[Tensor, Tensor]
"""Codes `i8[out, in]` and scales `f32[out]`."""

ReadStored = Callable[[Sequence[TensorPart]], Quantizer | None]
"""Reads a matrix in its stored format; None if it is to be dequantized."""

MERGED = "an adapter is merged into them; with quantize int8 they are faster"
"""Why packed matrices of a CPU are dequantized under an adapter."""


def fill_model(
    model: Stack,
    weights: CheckpointWeights,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: Adapter | None = None,
    *,
    read_stored: ReadStored | None = None,
    narrow: Quantizer | None = None,
    rounds_published: bool = False,
    parts_by_name: Mapping[str, Sequence[TensorPart]] | None = None,
    positions: int | None = None,
) -> None:
    """Give a model on the meta device its parameters, with an adapter's updates added.

    Matrices that `read_stored` reads keep their stored format. `narrow` converts other modules one
    by one to limit memory, from the published dtype with `rounds_published`. `parts_by_name`
    defaults to whole tensors.
    """
    parts_by_name = parts_by_name or parameter_parts(model, weights)
    names = {piece.source for parts in parts_by_name.values() for piece in parts}
    tables = fill_tables(model, weights, device)
    weights.check_names(model.config, names | tables | check_borrowed_embedding(model, weights))
    if adapter is not None:
        adapter.check_names(names)
    report, done, size = LOAD_PROGRESS.get(), 0, weights.size
    total = max(sum(parameter.numel() for parameter in model.parameters()), 1)
    report(0, size)
    for prefix, module in list(model.named_modules()):
        stored = None
        is_quantizable = type(module) in QUANTIZABLE_MODULES
        if read_stored is not None and is_quantizable:
            stored = read_stored(parts_by_name[f"{prefix}.weight"])
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            done += parameter.numel()
            report(size * done // total, size)
            if stored is not None and parameter.dim() == 2:
                continue
            is_matrix = parameter.dim() == 2 and is_quantizable
            # None keeps the published dtype, so that a matrix is rounded once.
            part_dtype = None if rounds_published and is_matrix else dtype
            found = [
                read_part(weights, piece, part_dtype, device, adapter)
                for piece in parts_by_name[name]
            ]
            whole = torch.cat(found) if len(found) > 1 else found[0]
            if missing := len(parameter) - len(whole):  # the last shard of a vocabulary is padded
                whole = F.pad(whole, (0, 0, 0, missing))
            own = nn.Parameter(whole, requires_grad=False)
            module.register_parameter(name.rpartition(".")[2], own)
        if stored is not None:
            model.set_submodule(prefix, stored(module))
        elif narrow is not None and (quantized := narrow(module)) is not module:
            model.set_submodule(prefix, quantized)
            module.register_parameter("weight", None)  # frees it: the list keeps the module alive
    rotary = torch.float32 if model.config.rope.float32 else dtype
    rotary_tables = model.build_rotary_tables(positions)
    model.cos, model.sin = (table.to(device, rotary) for table in rotary_tables)
    model.eval()


def build_stored_reader(
    weights: CheckpointWeights, quantize: str | None, dtype: torch.dtype, adapter: Adapter | None
) -> tuple[ReadStored, bool]:
    """Return a reader of matrices in their stored format, and whether block formats are kept.

    Block formats are kept for `native`, and those of 4 bits for `int4`; matrices under an adapter
    are not.
    """
    kept = {NATIVE: frozenset(BLOCK_FORMATS.values()), "int4": FOUR_BITS}
    kinds = kept.get(quantize or "", frozenset())
    keeps_blocks = bool(kinds) and weights.has_packed and has_packed_products()

    def read_stored(parts: Sequence[TensorPart]) -> Quantizer | None:
        if adapter is not None and any(piece.source in adapter.updates for piece in parts):
            if keeps_blocks and quantize == NATIVE:
                weights.unpacked.setdefault(MERGED, []).append(parts[0].source)
            return None
        packed = weights.read_packed(parts) if keeps_blocks else None
        if packed is not None and kinds.issuperset(kind for kind, *_ in packed.parts):
            return lambda module: pack_module(module, packed, dtype)
        if quantize == "int4":
            return None
        codes = read_int8_matrix(weights, parts, rounded=quantize == "int8")
        return None if codes is None else lambda module: int8_module(module, *codes, dtype)

    return read_stored, keeps_blocks


def read_int8_matrix(
    weights: CheckpointWeights, parts: Sequence[TensorPart], *, rounded: bool
) -> Int8Matrix | None:
    """Read a matrix stored in 8 bits, its parts stacked; None if a part is stored otherwise."""
    found: list[Int8Matrix] = []
    for piece in parts:
        matrix = weights.read_codes(piece.source, piece.shape, rounded=rounded)
        if matrix is None or not has_int8_products():
            return None
        found.append(matrix)
    codes, scale = zip(*found, strict=True)
    return torch.cat(codes), torch.cat(scale)


def fill_tables(model: Stack, weights: CheckpointWeights, device: torch.device | str) -> set[str]:
    """Give a draft its vocabulary tables; return their published names."""
    if not isinstance(model, Draft) or model.head_tokens is None:
        return set()
    for name, kind in VOCABULARY_TABLES.items():
        table = weights.read_table(name, tuple(getattr(model, name).shape), kind)
        model.register_buffer(name, table.to(device))
    try:
        model.check_tables()
    except ValueError as error:
        raise ValueError(f"{weights.folder}: {error}") from error
    return {*VOCABULARY_TABLES}


def check_borrowed_embedding(model: Stack, weights: CheckpointWeights) -> set[str]:
    """Check a draft's copy of the embedding that it borrows from its target.

    A quantized or sharded embedding of the target cannot be compared and is assumed equal.

    Returns:
        Published names of the copied tensors.
    """
    if not isinstance(model, Draft) or not (copied := borrowed_names(model, weights)):
        return set()
    (name,) = copied
    lender, size = model.lender[0].embedding, (model.config.vocab, model.config.dim)
    if is_quantized(lender) or lender.num_embeddings != size[0]:
        return copied
    for first in range(0, size[0], EMBEDDING_CHUNK_ROWS):
        ids = torch.arange(first, min(first + EMBEDDING_CHUNK_ROWS, size[0]))
        rows = lender(ids.to(lender.weight.device))
        own = weights.read_tensor(name, size, (slice(first, first + EMBEDDING_CHUNK_ROWS),))
        if not torch.equal(own.to(rows), rows):
            raise ValueError(
                f"{weights.tensor_path(name)}: tensor {name!r} differs from the "
                "target's embedding, which "
                "the draft borrows; give the target that the draft was trained for"
            )
    return copied


def borrowed_names(model: Stack, weights: CheckpointWeights) -> set[str]:
    """Return the published names of stored tensors that a draft borrows from its target."""
    if not isinstance(model, Draft) or model.embedding is not None:
        return set()
    names = config_family(model.config).tensor_names("embedding.weight")
    return {name for name in names if name in weights}


def read_part(
    weights: CheckpointWeights,
    piece: TensorPart,
    dtype: torch.dtype | None,
    device: torch.device | str,
    adapter: Adapter | None,
) -> Tensor:
    """Read a part with its adapter update; by default in the published type, at most float32."""
    source = piece.source
    if adapter is not None and source in adapter.updates:
        tensor = adapter.merge_weight(source, weights.read_tensor(source, piece.shape))[piece.index]
    else:
        tensor = weights.read_tensor(source, piece.shape, piece.index)
    if dtype is None:
        dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    tensor = tensor.to(device, dtype)
    if not is_finite(tensor):
        raise not_finite_error(weights.tensor_path(source), source, dtype)
    return tensor


def not_finite_error(path: Path, name: str, dtype: torch.dtype) -> ValueError:
    """Return the error for a tensor with NaN or infinite values."""
    return ValueError(
        f"{path}: tensor {name!r} has NaN or infinite values in {dtype}; choose a wider dtype or a "
        "whole checkpoint"
    )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; NaN and infinity propagate to the extremes."""
    if not tensor.numel():  # a shard past the end of a small vocabulary
        return True
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())
