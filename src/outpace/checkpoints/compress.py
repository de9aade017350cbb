"""Writing int8 checkpoints in the format `int-quantized` of compressed-tensors.

Every matrix is stored as integers with a scale per output; activations are quantized dynamically.
Files are converted one at a time to limit memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outpace.checkpoints.checkpoint import Checkpoint, write_tokenizer
from outpace.checkpoints.fill import borrowed_names, fill_tables, read_part
from outpace.checkpoints.hub import CONFIG_FILE, Progress, ignore_progress
from outpace.checkpoints.name import is_gguf
from outpace.checkpoints.quantised import QUANTIZATION_FIELD
from outpace.checkpoints.quantised.compressed import INT8_CODES
from outpace.checkpoints.stacks import stack_sizes
from outpace.checkpoints.weights import (
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    CheckpointWeights,
    TensorPart,
    source_tensors,
)
from outpace.decoding.target import DRAFT_KINDS
from outpace.errors import OptionError
from outpace.models.extending import build_draft_model
from outpace.models.int8 import QUANTIZABLE_MODULES, quantize_weight
from outpace.models.transformer import Stack, Transformer

try:
    import fcntl
except ImportError:  # on Windows, where partial folders of killed processes are not removed
    fcntl = None  # type: ignore[assignment]


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `folder` at the end and is removed on any error.

    Partial folders of killed processes are removed first.
    """
    home, name = folder.resolve().parent, folder.resolve().name
    home.mkdir(parents=True, exist_ok=True)
    for path in home.iterdir():
        if fcntl and re.fullmatch(rf"\.{re.escape(name)}\.\d+\.partial", path.name):
            with suppress(OSError), lock_partial_folder(path):
                shutil.rmtree(path)
    partial = home / f".{name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        with lock_partial_folder(partial):
            yield partial
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def lock_partial_folder(folder: Path) -> Iterator[None]:
    """Lock a folder; the operating system releases the lock when the process ends."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


COPIED_PATTERNS = ("*.json", "*.txt", "*.jinja")
"""Files that are copied: all but the weights, their configuration and their index."""


def int8_scheme(ignored: list[str]) -> dict[str, Any]:
    every = {
        "targets": ["Linear", "Embedding"],
        "weights": {**INT8_CODES, "strategy": "channel", "dynamic": False},
        "input_activations": {**INT8_CODES, "strategy": "token", "dynamic": True},
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


def compress_checkpoint(
    name: str | Path,
    folder: str | Path,
    *,
    target: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a model with int8 matrices, and its tokenizer.

    The result computes the same as the original with `quantize="int8"`.

    Args:
        name: Model to read.
        folder: New or empty folder to write to.
        target: For a draft, the model that it drafts for. Only its configuration is read.
        progress: Receives the number of written tensors and their total.

    Returns:
        The folder.

    Raises:
        ValueError: For a model that is already quantized or is a head of its target, for a draft
            without its target, for a folder that is not empty, and if a file cannot be written;
            then nothing is written.
    """
    origin, folder = Checkpoint(name), Path(folder)
    if origin.scheme is not None:
        raise ValueError(f"{str(name)!r} is already quantized: give the original checkpoint")
    model = build_skeleton(origin, target)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists: name a new folder")
    try:
        with partial_folder(folder) as partial:
            write_checkpoint(origin, model, partial, progress or ignore_progress)
            copy_files(origin, partial)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error
    return folder


def build_skeleton(checkpoint: Checkpoint, target: str | Path | None) -> Stack:
    """Build a model without weights; raise `ValueError` unless `target` fits it."""
    config, name = checkpoint.config, str(checkpoint)
    is_draft = config.kind in DRAFT_KINDS
    if config.is_head:
        raise ValueError(f"{name!r} is part of its target: give the target instead")
    if is_draft and target is None:
        raise OptionError("target", None, f"{name!r} is a draft: give its target too")
    if not is_draft and target is not None:
        raise OptionError("target", target, f"{name!r} is not a draft: leave target out")
    with torch.device("meta"):
        if target is None:
            return Transformer(config)
        try:
            lender = Transformer(Checkpoint(target).target_config())
        except OptionError as error:
            raise error.with_param("target") from error
        return build_draft_model(config, lender)


def copy_files(origin: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer, and the other small files of a folder."""
    if is_gguf(origin.folder):
        write_tokenizer(origin.folder, folder)
        return
    for home in (origin.folder, origin.tokenizer_folder):
        for path in (path for pattern in COPIED_PATTERNS for path in sorted(home.glob(pattern))):
            if path.is_file() and path.name not in (CONFIG_FILE, WEIGHTS_INDEX):
                shutil.copyfile(path, folder / path.name)


def write_checkpoint(origin: Checkpoint, model: Stack, folder: Path, progress: Progress) -> None:
    """Write the weights of `model` and `config.json`."""
    config = model.config
    shapes = {
        source: (size, *parameter.shape[1:])
        for name, parameter in model.named_parameters()
        for source, size in source_tensors(config, name, parameter.shape[0])
    }
    if stacks := stack_sizes(shapes):
        raise ValueError(
            f"{origin.folder}: tensor {min(stacks)!r} is a stack of matrices, which an int8 "
            "checkpoint cannot hold: load the original with quantize='int8'"
        )
    matrices = {
        source
        for prefix, module in model.named_modules()
        if type(module) in QUANTIZABLE_MODULES
        for source, _ in source_tensors(config, f"{prefix}.weight", 1)
    }
    with ExitStack() as stack:
        weights = origin.open_weights(stack)
        tables = {name: getattr(model, name) for name in fill_tables(model, weights, "cpu")}
        weights.check_names(config, {*shapes, *tables, *borrowed_names(model, weights)})
        files: dict[str, list[str]] = {}
        for name in (*shapes, *tables):
            file = WEIGHTS_FILE if is_gguf(origin.folder) else weights.tensor_path(name).name
            files.setdefault(file, []).append(name)
        index: dict[str, str] = {}
        done = 0
        for file, names in sorted(files.items()):
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensors |= (
                    {name: tables[name]}
                    if name in tables
                    else quantize_tensor(weights, name, shapes[name], matrix=name in matrices)
                )
                done += 1
                progress(done, len(shapes) + len(tables))
            save_file(tensors, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
    text = {**config.source, QUANTIZATION_FIELD: int8_scheme(["lm_head"] if config.tied else [])}
    write_json_file(folder / CONFIG_FILE, text)
    if len(files) > 1:
        write_json_file(folder / WEIGHTS_INDEX, {"metadata": {}, "weight_map": index})


def quantize_tensor(
    weights: CheckpointWeights, name: str, shape: tuple[int, ...], *, matrix: bool
) -> dict[str, Tensor]:
    """Return a matrix's codes `i8[out, in]` and scales `f32[out, 1]`; other tensors unchanged."""
    found = weights.read_codes(name, shape, rounded=True) if matrix else None
    if found is None:
        plain = read_part(weights, TensorPart(name, shape), None, "cpu", None)
        if not matrix:
            return {name: plain}
        found = quantize_weight(plain)
    codes, scale = found
    return {name: codes, f"{name}_scale": scale[:, None].contiguous()}


def write_json_file(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
