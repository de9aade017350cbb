"""Loading of models, and of the drafts that read their features."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from outpace.checkpoints.adapter import Adapter
from outpace.checkpoints.checkpoint import Checkpoint, limit_positions
from outpace.checkpoints.checkpoint import load_config as load_config
from outpace.checkpoints.fill import build_stored_reader, fill_model
from outpace.checkpoints.weights import save_model as save_model
from outpace.checkpoints.weights import sharded_parts
from outpace.decoding.target import DRAFT_KINDS
from outpace.errors import prefix_error
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model
from outpace.models.low_bits import build_cpu_quantizer, build_quantizer, check_quantize
from outpace.models.packed import log_packed
from outpace.models.split import ModelShard, keep_one_bias, parallelize_model
from outpace.models.transformer import Stack, Transformer

StackType = TypeVar("StackType", bound=Stack)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How the weights of models are kept, see `load_model`."""

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    quantize: str | None = None
    plain: bool = False
    share: ModelShard | None = None
    """Shard of this process."""
    positions: int | None = None
    """Length of the rotary tables, if a runner extends them to that of its cache."""


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    adapter: str | Path | None = None,
    mask_id: int | None = None,
    quantize: str | None = None,
    plain: bool = False,
) -> Transformer:
    """Load a model in its published format, and merge an adapter if one is given.

    `max_length` limits the rotary tables, and `mask_id` overrides the mask token. `quantize` is
    `int8`, `int4`, or `native` for stored blocks of 4 to 8 bits on a CPU, or `fp8`, `int8` or
    `int4` for projections on a GPU. Other quantized weights are dequantized, except int8 on a CPU;
    `plain` dequantizes these too, as training needs.

    Raises:
        ValueError: For a missing tensor or wrong shape, and for a draft, which needs its target.
    """
    checkpoint = Checkpoint(name)
    update = None if adapter is None else Adapter(adapter)
    config = checkpoint.target_config(max_length=max_length, mask_id=mask_id, adapter=update)
    form = WeightFormat(dtype=dtype, device=device, quantize=quantize, plain=plain)
    return build_model(Transformer, checkpoint, config, form, update)


def load_draft(
    name: str | Path,
    target: Transformer,
    *,
    max_length: int | None = None,
    quantize: str | None = None,
    plain: bool = False,
) -> Draft:
    """Load a draft that reads the features of `target`, with the target's dtype and device.

    Options are those of `load_model`. Raises `ValueError` as it does, and if draft and target do
    not match.
    """
    like = target.norm.weight
    form = WeightFormat(dtype=like.dtype, device=like.device, quantize=quantize, plain=plain)
    return build_draft(Checkpoint(name), target, max_length, form)


def build_draft(
    checkpoint: Checkpoint, target: Transformer, max_length: int | None, form: WeightFormat
) -> Draft:
    config = limit_positions(checkpoint.config, max_length)
    if config.kind not in DRAFT_KINDS:
        raise ValueError(
            f"{str(checkpoint)!r} is not a draft that reads features: its architecture is "
            f"{config.architecture}"
        )
    draft = build_model(lambda sizes: build_draft_model(sizes, target), checkpoint, config, form)
    draft.borrow_rows(plain=form.plain)
    return draft


def build_model(
    make: Callable[[ModelConfig], StackType],
    checkpoint: Checkpoint,
    config: ModelConfig,
    form: WeightFormat,
    adapter: Adapter | None = None,
) -> StackType:
    """Build a model of the class `make`, and fill it with the tensors of a checkpoint."""
    dtype, device, quantize, share = form.dtype, form.device, form.quantize, form.share
    check_quantize(quantize, device, dtype)
    with ExitStack() as stack:
        weights = checkpoint.open_weights(stack, config)
        weights.check_depth(config)
        wanted = None
        try:
            with torch.device("meta"):
                model = make(config)
                if share is not None:
                    whole, model = model, make(share.shard_config(config))
                    parallelize_model(model, share)
                    wanted = sharded_parts(model, whole, share)
            narrow = build_quantizer(model, quantize, device)
            rounds = build_cpu_quantizer(model, quantize, dtype) if narrow is None else None
        except ValueError as error:
            raise prefix_error(str(checkpoint.folder), error) from error
        keeps = not form.plain and share is None and torch.device(device).type == "cpu"
        read, packs = (
            build_stored_reader(weights, quantize, dtype, adapter) if keeps else (None, False)
        )
        fill_model(
            *(model, weights, dtype, device, adapter),
            read_stored=read,
            narrow=narrow or rounds,
            rounds_published=rounds is not None,
            parts_by_name=wanted,
            positions=form.positions,
        )
        weights.log_unpacked()
    if packs or quantize == "int4":
        log_packed(checkpoint.folder, model)
    if share is not None:
        keep_one_bias(model, share)
    return model
