"""A model's parameters from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.checkpoints.adapter import Adapter
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.piece import Piece, pieces
from outpace.checkpoints.progress import TOLD
from outpace.checkpoints.weights import Weights
from outpace.models.draft import Draft
from outpace.models.int8 import QUANTISED, exact, hold, is_quantised, quantise
from outpace.models.packed import hold_packed
from outpace.models.transformer import Stack

TABLES = {"d2t": "I64", "t2d": "BOOL"}
"""Tables of a draft's vocabulary, and their dtypes."""

PIECE = 2**14
"""Rows of an embedding that are compared at a time."""

Matrix = tuple[Tensor, Tensor]
"""Codes `i8[out, in]` and scales `f32[out]`."""


def fill(
    model: Stack,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device | str,
    adapter: Adapter | None = None,
    *,
    quantize: bool = False,
    keeps: bool = False,
    native: bool = False,
    narrow: Callable[[nn.Module], None] | None = None,
    wanted: Mapping[str, Sequence[Piece]] | None = None,
) -> None:
    """Give a model without memory its parameters, with an adapter's updates added.

    To `quantize` is done matrix by matrix, so that no two are in memory in full; so it is
    where something else is to `narrow` a module. With `keeps`, matrices that are stored with 8 bits
    stay so, and with `native` those in a block format as well. What is `wanted` for each parameter
    are whole tensors unless it is given.
    """
    wanted = wanted or pieces(model)
    names = {piece.source for parts in wanted.values() for piece in parts}
    tables = fill_tables(model, weights, device)
    weights.check_names(model.config, names | tables | borrowed(model, weights))
    if adapter is not None:
        adapter.check(names)
    say, done, size = TOLD.get(), 0, weights.size
    total = max(sum(parameter.numel() for parameter in model.parameters()), 1)
    say(0, size)
    for prefix, module in list(model.named_modules()):
        stored = None
        if keeps and type(module) in QUANTISED:
            parts = wanted[f"{prefix}.weight"]
            if adapter is None or not any(piece.source in adapter.updates for piece in parts):
                stored = stored_matrix(weights, parts, rounded=quantize, native=native)
        for name, parameter in list(module.named_parameters(prefix, recurse=False)):
            done += parameter.numel()
            say(size * done // total, size)
            if stored is not None and parameter.dim() == 2:
                continue
            rounds = quantize and parameter.dim() == 2 and type(module) in QUANTISED
            kept = None if rounds else dtype
            found = [part(weights, piece, kept, device, adapter) for piece in wanted[name]]
            whole = torch.cat(found) if len(found) > 1 else found[0]
            if missing := len(parameter) - len(whole):  # of the last slice of a vocabulary
                whole = F.pad(whole, (0, 0, 0, missing))
            own = nn.Parameter(whole, requires_grad=False)
            module.register_parameter(name.rpartition(".")[2], own)
        if stored is not None:
            stored(module, dtype)
        elif quantize:
            quantise(module, dtype)
        elif narrow is not None:
            narrow(module)
    rotary = torch.float32 if model.config.rope.float32 else dtype
    model.cos, model.sin = (table.to(device, rotary) for table in model.rotary())
    model.eval()


def stored_matrix(
    weights: Weights, parts: Sequence[Piece], *, rounded: bool, native: bool
) -> Callable[[nn.Module, torch.dtype], None] | None:
    """What gives a module its matrix as it is stored; None where that becomes plain."""
    if native and (packed := weights.packed(parts)) is not None:
        return lambda module, dtype: hold_packed(module, packed, dtype)
    if (codes := coded(weights, parts, rounded=rounded)) is not None:
        return lambda module, dtype: hold(module, *codes, dtype)
    return None


def coded(weights: Weights, parts: Sequence[Piece], *, rounded: bool) -> Matrix | None:
    """A matrix that is stored with 8 bits, one part upon the other; None where one is not."""
    found: list[Matrix] = []
    for piece in parts:
        matrix = weights.codes(piece.source, piece.shape, rounded=rounded)
        if matrix is None or not exact():
            return None
        found.append(matrix)
    codes, scale = zip(*found, strict=True)
    return torch.cat(codes), torch.cat(scale)


def fill_tables(model: Stack, weights: Weights, device: torch.device | str) -> set[str]:
    """Give a draft the tables of its vocabulary; their published names."""
    if not isinstance(model, Draft) or model.says is None:
        return set()
    for name, kind in TABLES.items():
        table = weights.stored(name, (tuple(getattr(model, name).shape),), (kind,))
        model.register_buffer(name, table.to(device))
    try:
        model.check_tables()
    except ValueError as error:
        raise ValueError(f"{weights.folder}: {error}") from error
    return {*TABLES}


def borrowed(model: Stack, weights: Weights) -> set[str]:
    """Published tensors that a draft has and its target lends it, which must be the same.

    A target's embedding that is rounded or sliced cannot be compared, and is taken for the same.
    """
    if not isinstance(model, Draft) or model.embedding is not None:
        return set()
    (name,) = FAMILIES[model.config.family].published("embedding.weight")
    if name not in weights:
        return set()
    lender, size = model.lender[0].embedding, (model.config.vocab, model.config.dim)
    if is_quantised(lender) or lender.num_embeddings != size[0]:
        return {name}
    for first in range(0, size[0], PIECE):
        ids = torch.arange(first, min(first + PIECE, size[0]))
        rows = lender(ids.to(lender.weight.device))
        own = weights.tensor(name, size, (slice(first, first + PIECE),))
        if not torch.equal(own.to(rows), rows):
            raise ValueError(
                f"{weights.path(name)}: tensor {name!r} is another embedding than the target's, "
                "which the draft is to borrow; name the target that it was made for"
            )
    return {name}


def part(
    weights: Weights,
    piece: Piece,
    dtype: torch.dtype | None,
    device: torch.device | str,
    adapter: Adapter | None,
) -> Tensor:
    """A piece in a dtype, by default the published one as far as it is no wider than float32."""
    source = piece.source
    if adapter is not None and source in adapter.updates:
        found = adapter.merge(source, weights.tensor(source, piece.shape))[piece.index]
    else:
        found = weights.tensor(source, piece.shape, piece.index)
    if dtype is None:
        dtype = torch.float32 if found.dtype == torch.float64 else found.dtype
    found = found.to(device, dtype)
    if not finite(found):
        raise not_finite(weights.path(source), source, dtype)
    return found


def not_finite(path: Path, name: str, dtype: torch.dtype) -> ValueError:
    """What to raise for a tensor that has other values than numbers."""
    return ValueError(
        f"{path}: tensor {name!r} has NaN or infinite values in {dtype}; choose a wider dtype or a "
        "whole checkpoint"
    )


def finite(tensor: Tensor) -> bool:
    """Whether all values are numbers; the extremes of any others are none either."""
    if not tensor.numel():  # a slice of a vocabulary that has fewer tokens
        return True
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())
