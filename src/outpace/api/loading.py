"""What an `LLM` may choose as it loads its models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outpace.api.declared import Info, declared


@dataclass(kw_only=True)
class LoadOptions:
    """The options of an `LLM` beside its model and method, as flags and TOML write them."""

    adapter: Annotated[str | None, Info("Folder or hub name of a LoRA to merge.", "loading")] = None
    dtype: Annotated[
        str | None,
        Info("float32, bfloat16 or float16.", "loading", usual="float32 on a CPU, else bfloat16"),
    ] = None
    quantize: Annotated[
        str | None, Info("native or int8; on a GPU fp8, int8 or int4.", "loading")
    ] = None
    device: Annotated[
        str | None, Info("cpu or cuda.", "loading", usual="cuda where there is one")
    ] = None
    max_length: Annotated[
        int | None,
        Info(
            "Most tokens of prompt and answer.",
            "loading",
            usual="the model's",
            bounds={"ge": 1},
        ),
    ] = None
    mask_id: Annotated[
        int | None,
        Info("Token id of a hole.", "loading", usual="that of config.json", bounds={"ge": 0}),
    ] = None
    cache_gib: Annotated[
        float | None,
        Info(
            "GiB for keys and values.",
            "loading",
            usual="2, or half of a GPU's free memory",
            bounds={"gt": 0},
        ),
    ] = None
    max_rows: Annotated[int, Info(bounds={"ge": 1})] = 2048
    max_sequences: Annotated[int, Info(bounds={"ge": 1})] = 256
    prefix_cache: Annotated[bool, Info()] = True
    tensor_parallel: Annotated[
        int,
        Info(
            "Processes, of torchrun, that split each model.",
            "loading",
            shows=True,
            bounds={"ge": 1},
        ),
    ] = 1
    attention: Annotated[
        str,
        Info("auto, dense, compiled (on a CPU) or triton (on a GPU).", "loading", shows=True),
    ] = "auto"
    graphs: Annotated[
        bool, Info("Run passes that came before in one launch (on a GPU).", "loading")
    ] = False
    compile: Annotated[
        bool, Info("Have PyTorch compile the layers of models (on a GPU).", "loading")
    ] = False
    pace: Annotated[
        str, Info("off, or auto: less parallel where that is faster.", "loading", shows=True)
    ] = "off"


LOAD = declared(LoadOptions)
"""The options of an `LLM` by their names."""
