"""Writing int8 checkpoints in the format `int-quantized` of compressed-tensors.

Every matrix is stored as integers with a scale per output; activations are quantized dynamically.
Files are converted one at a time to limit memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outpace.checkpoints.fields import brief
from outpace.checkpoints.fill import part
from outpace.checkpoints.gguf.file import is_gguf
from outpace.checkpoints.load import (
    CONFIG,
    load_config,
    load_tokenizer,
    published,
    resolve,
    tokenizer_folder,
    weights_of,
)
from outpace.checkpoints.partial import partial_folder
from outpace.checkpoints.piece import Piece, sources
from outpace.checkpoints.progress import Progress, ignore
from outpace.checkpoints.quantised import FIELD, scheme_of
from outpace.checkpoints.quantised.compressed import CODES
from outpace.checkpoints.weights import INDEX, SINGLE, Weights
from outpace.decoding.target import DRAFT_KINDS
from outpace.models.int8 import QUANTISED, of_weight
from outpace.models.transformer import Transformer

KNOWN = ("int8",)
"""Supported formats."""

BESIDE = ("*.json", "*.txt", "*.jinja")
"""Files that are copied: all but the weights, their configuration and their index."""


def scheme(ignored: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of int8 matrices, including embedding and head."""
    every = {
        "targets": ["Linear", "Embedding"],
        "weights": {**CODES, "strategy": "channel", "dynamic": False},
        "input_activations": {**CODES, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": every},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def compress(
    name: str | Path, folder: str | Path, *, to: str = "int8", progress: Progress | None = None
) -> Path:
    """Write a model with int8 matrices, and its tokenizer.

    The result computes the same as the original with `quantize="int8"`.

    Args:
        name: Model to read.
        folder: New or empty folder to write to.
        to: Format, `int8`.
        progress: Receives the number of written tensors and their total.

    Returns:
        The folder.

    Raises:
        ValueError: For a model that is already quantized or is a draft, for a folder that is not
            empty, and if a file cannot be written; then nothing is written.
    """
    if to not in KNOWN:
        raise ValueError(f"unknown format {brief(to)} to quantize to; known are {', '.join(KNOWN)}")
    origin, folder = resolve(name), Path(folder)
    config = load_config(origin)
    if not is_gguf(origin) and scheme_of(published(origin / CONFIG)) is not None:
        raise ValueError(f"{str(name)!r} is already quantized: give the original checkpoint")
    if config.kind in DRAFT_KINDS:
        raise ValueError(f"{str(name)!r} is a draft, which is small: give its target instead")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists: name a new folder")
    try:
        with partial_folder(folder) as partial:
            write(origin, partial, progress or ignore)
            write_tokenizer(origin, partial)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error
    return folder


def write_tokenizer(origin: Path, folder: Path) -> None:
    """Write the tokenizer of a checkpoint and its other small files."""
    if is_gguf(origin):
        if (tokenizer := load_tokenizer(origin)) is not None:
            tokenizer.save_pretrained(folder)
        return
    for path in beside(origin, tokenizer_folder(origin)):
        shutil.copyfile(path, folder / path.name)


def beside(*folders: Path) -> list[Path]:
    """Return the tokenizer's files and the other small files of a checkpoint."""
    found = {
        path.name: path
        for folder in folders
        for pattern in BESIDE
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.name not in (CONFIG, INDEX)
    }
    return list(found.values())


def write(origin: Path, folder: Path, progress: Progress) -> None:
    """Write weights and `config.json`."""
    config = load_config(origin)
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {
        source: (size, *parameter.shape[1:])
        for name, parameter in model.named_parameters()
        for source, size in sources(config, name, parameter.shape[0])
    }
    matrices = {
        source
        for prefix, module in model.named_modules()
        if type(module) in QUANTISED
        for source, _ in sources(config, f"{prefix}.weight", 1)
    }
    with ExitStack() as stack:
        weights = weights_of(origin, config, stack)
        weights.check_names(config, shapes)
        files: dict[str, list[str]] = {}
        for name in shapes:
            file = SINGLE if is_gguf(origin) else weights.path(name).name
            files.setdefault(file, []).append(name)
        index: dict[str, str] = {}
        done = 0
        for file, names in sorted(files.items()):
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensors |= stored(weights, name, shapes[name], matrix=name in matrices)
                done += 1
                progress(done, len(shapes))
            save_file(tensors, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
    text = {**config.source, FIELD: scheme(["lm_head"] if config.tied else [])}
    write_json(folder / CONFIG, text)
    if len(files) > 1:
        write_json(folder / INDEX, {"metadata": {}, "weight_map": index})


def stored(
    weights: Weights, name: str, shape: tuple[int, ...], *, matrix: bool
) -> dict[str, Tensor]:
    """Return a matrix's codes `i8[out, in]` and scales `f32[out, 1]`; other tensors unchanged."""
    found = weights.codes(name, shape, rounded=True) if matrix else None
    if found is None:
        plain = part(weights, Piece(name, shape), None, "cpu", None)
        if not matrix:
            return {name: plain}
        found = of_weight(plain)
    codes, scale = found
    return {name: codes, f"{name}_scale": scale[:, None].contiguous()}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
