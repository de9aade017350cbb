"""Models that are loaded when they are requested: their options, files and memory."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from outpace.api.llm import LLM
from outpace.api.loading import resolve_types
from outpace.api.model_loader import LazyModel
from outpace.checkpoints.load import load_adapter
from outpace.checkpoints.stored_size import loaded_bytes
from outpace.engine.cache import cache_bytes, check_cache_gib
from outpace.engine.engine import Pacing
from outpace.errors import OptionError
from outpace.methods.method import check_type
from outpace.models.low_bits import default_quantize
from outpace.server.settings import Entry

DEFAULT_KEEP = "10m"

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"([0-9]{1,6})([smhd])")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `10m`; raises `OptionError` for any other text."""
    if (found := DURATION.fullmatch(text)) is None:
        message = f"keep must be a whole number with s, m, h or d, such as 10m, got {text!r}"
        raise OptionError("keep", text, message)
    return float(found[1]) * UNIT_SECONDS[found[2]]


def check_lazy_options(entry: Entry) -> None:
    """Raise `OptionError` for options of loading on request that do not fit each other."""
    if entry.keep is not None:
        parse_duration(entry.keep)
        if not entry.lazy:
            message = "keep needs lazy: set lazy as well, or omit keep"
            raise OptionError("keep", entry.keep, message)
    if entry.lazy and entry.tensor_parallel > 1:
        message = "lazy cannot be combined with tensor_parallel: omit one"
        raise OptionError("lazy", entry.lazy, message)


def make_lazy_model(entry: Entry, load: Callable[[], LLM]) -> LazyModel:
    """Check the files and options of a lazy model, and measure the memory that it needs.

    Args:
        entry: The model.
        load: Function that loads it.

    Raises:
        ValueError: If a file is missing or cannot be read, or an option does not fit.
    """
    check_cache_gib(entry.cache_gib)
    check_type("pace", entry.pace, Pacing)
    device, dtype = resolve_types(
        entry.device,
        entry.dtype,
        entry.quantize,
        entry.attention,
        entry.compile,
        entry.graphs,
        entry.tensor_parallel,
    )
    quantize = default_quantize(entry.quantize, entry.dtype, device, entry.tensor_parallel)
    if entry.adapter is not None:
        load_adapter(entry.adapter)
    for folder in (entry.adapters or {}).values():
        load_adapter(folder)
    paths = {entry.path, *entry.further_models().values()}
    is_measured = entry.cache_gib is None and device.type == "cuda"  # half of what is free then
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return LazyModel(
        load=load,
        keep_seconds=parse_duration(entry.keep or DEFAULT_KEEP),
        device=device,
        weight_bytes=sum(loaded_bytes(path, dtype, quantize) for path in paths),
        cache_bytes=0 if is_measured else len(paths) * cache_bytes(entry.cache_gib, device),
    )
