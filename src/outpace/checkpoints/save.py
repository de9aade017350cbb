"""Writing a model's parameters as a checkpoint in its family's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outpace.checkpoints.piece import source_tensors
from outpace.checkpoints.stacks import stack_entries
from outpace.checkpoints.weights import WEIGHTS_FILE
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model
from outpace.models.transformer import Stack, Transformer


def save_model(
    model: Stack,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` in the format of the model's family.

    Args:
        model: The model.
        folder: Folder to write to; created if missing.
        dtype: Type of the written floating-point tensors.
        parameters: Whole parameters by name, if those of the model are sharded.

    Raises:
        ValueError: If the parameters do not match the model's configuration, so that no program
            could load them, or if the files cannot be written.
    """
    folder = Path(folder)
    parameters = parameters or model.state_dict()
    check_parameters(model, parameters)
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        dense = (parameter.to_dense() if parameter.is_mkldnn else parameter).to("cpu", kind)
        names, sizes = zip(*source_tensors(model.config, name, dense.shape[0]), strict=True)
        parts = zip(names, dense.split(sizes), strict=True)
        tensors |= {source: part.contiguous() for source, part in parts}
    config = {**model.config.source, "torch_dtype": str(dtype).removeprefix("torch.")}
    config.pop("quantization_config", None)  # the written tensors are not quantized
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(stack_entries(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written: {error}") from error


def check_parameters(model: Stack, parameters: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` naming a parameter that does not match the model's configuration."""
    with torch.device("meta"):
        fresh = (
            build_draft_model(model.config, *model.lender)
            if isinstance(model, Draft)
            else Transformer(model.config)
        )
    wanted = {name: parameter.shape for name, parameter in fresh.state_dict().items()}
    found = {name: parameter.shape for name, parameter in parameters.items()}
    if differing := sorted(dict(wanted.items() ^ found.items())):
        raise ValueError(
            f"parameter {differing[0]!r} is missing, unexpected or of another shape "
            f"({len(differing)} such parameters): a saved model must have the modules of "
            f"{model.config.architecture}"
        )
