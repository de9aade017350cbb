"""Options of loading an `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch

from outpace.api.options import Info, list_options
from outpace.attention.choice import check_backend
from outpace.engine.fuse import check_compilation
from outpace.engine.graphs import check_graphs
from outpace.models.device import resolve_device, resolve_dtype
from outpace.models.low_bits import check_quantize


@dataclass(kw_only=True)
class LoadOptions:
    """Options of an `LLM` other than model and method, shared by flags and TOML.

    They are described in `LLM`.
    """

    adapter: Annotated[
        str | None, Info("Folder or hub name of a LoRA adapter to merge.", "loading")
    ] = None
    adapters: Annotated[Mapping[str, str] | None, Info()] = None
    dtype: Annotated[
        str | None,
        Info(
            "Data type: float32, bfloat16 or float16.",
            "loading",
            usual="float32 on a CPU, else bfloat16",
        ),
    ] = None
    quantize: Annotated[
        str | None,
        Info("Weight format: native, int8 or int4; on a GPU fp8, int8 or int4.", "loading"),
    ] = None
    device: Annotated[
        str | None, Info("Device: cpu or cuda.", "loading", usual="cuda if available")
    ] = None
    max_length: Annotated[
        int | None,
        Info(
            "Maximum number of tokens of prompt and answer.",
            "loading",
            usual="the model's",
            bounds={"ge": 1},
        ),
    ] = None
    mask_id: Annotated[
        int | None,
        Info("Id of the mask token.", "loading", usual="from config.json", bounds={"ge": 0}),
    ] = None
    cache_gib: Annotated[
        float | None,
        Info(
            "Size of the KV cache in GiB.",
            "loading",
            usual="2, or half of a GPU's free memory",
            bounds={"gt": 0},
        ),
    ] = None
    max_rows: Annotated[int | None, Info(bounds={"ge": 1})] = None
    max_sequences: Annotated[int, Info(bounds={"ge": 1})] = 256
    prefix_cache: Annotated[bool, Info()] = True
    tensor_parallel: Annotated[
        int,
        Info(
            "Number of torchrun processes that split each model.",
            "loading",
            shows=True,
            bounds={"ge": 1},
        ),
    ] = 1
    attention: Annotated[
        str,
        Info(
            "Attention back end: auto, dense, compiled (CPU) or triton (GPU).",
            "loading",
            shows=True,
        ),
    ] = "auto"
    graphs: Annotated[bool, Info("Record passes as CUDA graphs (GPU only).", "loading")] = False
    compile: Annotated[
        bool, Info("Compile the layers with torch.compile (GPU only).", "loading")
    ] = False
    pace: Annotated[
        str, Info("off, or auto: reduce parallelism when that is faster.", "loading", shows=True)
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
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    check_quantize(quantize, device, dtype)
    check_backend(attention, device)
    check_compilation(compile, device, tensor_parallel)
    check_graphs(graphs, device, tensor_parallel)
    return device, dtype
