"""Device and dtype of a model."""

from __future__ import annotations

import torch

from outpace.errors import OptionError
from outpace.kernels.loader import Isa, has_isa

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return a device by name; by default a GPU if there is one.

    Raises:
        OptionError: if the device is not available.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not isinstance(device, str | torch.device):
            raise NotImplementedError("it must be a name such as 'cpu' or 'cuda'")
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition(". ")[0]
        message = f"no device {str(device)!r} here: {reason}; use cpu, or cuda if available"
        raise OptionError("device", device, f"device: {message}") from error
    return torch.device(device)


def computes_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for products in bfloat16."""
    return device.type != "cpu" or has_isa(Isa.AVX512_BF16)


def check_single_gpu(option: str, device: torch.device, processes: int) -> None:
    """Raise `OptionError` unless the model runs in one process on a CUDA device."""
    if device.type != "cuda":
        message = f"{option} requires a CUDA device, got {device.type}; omit {option}"
        raise OptionError(option, True, message)
    if processes > 1:
        message = f"{option} requires a model in one process; omit {option} or tensor_parallel"
        raise OptionError(option, True, message)


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return a dtype by name, or the default of a device.

    Raises:
        OptionError: if the dtype is not supported.
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    allowed = DTYPES | {kind: kind for kind in DTYPES.values()}
    if not isinstance(dtype, str | torch.dtype) or dtype not in allowed:
        message = f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}"
        raise OptionError("dtype", dtype, message)
    return allowed[dtype]
