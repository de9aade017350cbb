"""Options of loading an `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from outpace.api.options import Info
from outpace.field_types import Bounds, CacheSize, PositiveInt, list_options

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of an `LLM` other than model and method, shared by flags and TOML."""

    adapter: Annotated[
        str | None, "Folder or hub name of a LoRA adapter to merge.", Info(group="loading")
    ] = None
    adapters: Annotated[
        Mapping[str, str] | None,
        "Folders or hub names of low-rank adapters that requests select, by name.",
    ] = None
    dtype: Annotated[
        str | None,
        "Data type: float32, bfloat16 or float16.",
        Info(group="loading", usual="float32 on a CPU, else bfloat16"),
    ] = None
    quantize: Annotated[
        str | None,
        "Weight format: native, int8 or int4; on a GPU fp8, int8 or int4. On a CPU, files of 4 to "
        "8 bits stay native unless `dtype` or this is set.",
        Info(group="loading"),
    ] = None
    device: Annotated[
        str | None, "Device: cpu or cuda.", Info(group="loading", usual="cuda if available")
    ] = None
    max_length: Annotated[
        PositiveInt | None,
        "Maximum number of tokens of prompt and answer.",
        Info(group="loading", usual="the model's"),
    ] = None
    mask_id: Annotated[
        Annotated[int, Bounds(0)] | None,
        "Id of the mask token.",
        Info(group="loading", usual="from config.json"),
    ] = None
    cache_gib: Annotated[
        CacheSize | None,
        "Size of the KV cache in GiB. Each model has one.",
        Info(group="loading", usual="its context, at least 2, at most a quarter of the memory"),
    ] = None
    cache_dtype: Annotated[
        str | None,
        "Data type of the KV cache: float32, bfloat16, float16 or int8.",
        Info(group="loading", usual="float16 for quantized weights on a CPU, else `dtype`"),
    ] = None
    max_rows: Annotated[
        PositiveInt | None,
        "Maximum number of rows (query tokens) per pass; by default 512 on a CPU, where more save "
        "nothing and long prompts would delay other requests, and 2048 on a GPU.",
    ] = None
    max_sequences: Annotated[PositiveInt, "Maximum number of running requests."] = 256
    prefix_cache: Annotated[
        bool, "Whether causal models reuse the cache of prompts with a common prefix."
    ] = True
    prefix_dir: Annotated[
        str | None,
        "Private folder that keeps the prefixes of causal models for later processes.",
        Info(group="loading"),
    ] = None
    prefix_gib: Annotated[
        CacheSize,
        "Most GiB of that folder; the least recently used prefixes are deleted first.",
        Info(group="loading", shows=True),
    ] = 8.0
    tensor_parallel: Annotated[
        PositiveInt,
        "Number of torchrun processes that split each model. All but the first execute commands of "
        "the first in the constructor, then raise `SystemExit`.",
        Info(group="loading", shows=True),
    ] = 1
    attention: Annotated[
        str,
        "Attention back end: auto, dense, compiled (CPU) or triton (GPU).",
        Info(group="loading", shows=True),
    ] = "auto"
    graphs: Annotated[bool, "Record passes as CUDA graphs (GPU only).", Info(group="loading")] = (
        False
    )
    compile: Annotated[
        bool, "Compile the layers with torch.compile (GPU only).", Info(group="loading")
    ] = False
    pace: Annotated[
        str,
        "off, or auto: reduce parallelism when that is faster.",
        Info(group="loading", shows=True),
    ] = "off"


LOAD_OPTIONS = list_options(LoadOptions)
"""Options of an `LLM` by name."""


def resolve_types(
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    quantize: str | None,
    attention: str,
    compile: bool,
    graphs: bool,
    tensor_parallel: int,
) -> tuple[torch.device, torch.dtype]:
    """Return device and data type for options of an `LLM`.

    Raises:
        OptionError: If an option is invalid, or not supported by that device or type.
    """
    from outpace.attention.choice import check_backend
    from outpace.engine.fuse import check_compilation
    from outpace.engine.graphs import check_graphs
    from outpace.models.device import resolve_device, resolve_dtype
    from outpace.models.low_bits import check_quantize

    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    check_quantize(quantize, device, dtype)
    check_backend(attention, device)
    check_compilation(compile, device, tensor_parallel)
    check_graphs(graphs, device, tensor_parallel)
    return device, dtype
