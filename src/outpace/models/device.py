"""Device and dtype of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outpace.errors import OptionError
from outpace.kernels.loader import Isa, has_isa

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return a device by name; by default a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not isinstance(device, str | torch.device):
            raise NotImplementedError("it must be a name such as 'cpu' or 'cuda'")
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition(". ")[0]
        raise OptionError(
            "device", device, f"{str(device)!r} cannot be used: {reason}; use cpu or cuda"
        ) from error
    return torch.device(device)


def computes_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for products in bfloat16."""
    return device.type != "cpu" or has_isa(Isa.AVX512_BF16)


def check_single_gpu(option: str, device: torch.device, processes: int) -> None:
    """Raise `OptionError` unless the model runs in one process on a CUDA device."""
    if device.type != "cuda":
        raise OptionError(option, True, f"needs a CUDA device, got {device.type}; omit {option}")
    if processes > 1:
        raise OptionError(
            option, True, f"needs a model in one process; omit {option} or tensor_parallel"
        )


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return a dtype by name, or the default of a device."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return parse_dtype("dtype", dtype, DTYPES)


def parse_dtype(
    option: str, given: str | torch.dtype, allowed: Mapping[str, torch.dtype]
) -> torch.dtype:
    """Return one of the `allowed` dtypes by name, or as it is; raise `OptionError` for others."""
    if isinstance(given, str) and given in allowed:
        return allowed[given]
    if isinstance(given, torch.dtype) and given in allowed.values():
        return given
    raise OptionError(option, given, f"must be one of {', '.join(allowed)}")
