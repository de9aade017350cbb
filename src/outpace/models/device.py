"""Where a model runs, and in which numbers."""

from __future__ import annotations

import torch

from outpace.errors import OptionError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str | torch.device | None) -> torch.device:
    """A device by name; by default a GPU where there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not isinstance(device, str | torch.device):
            raise NotImplementedError("give a name such as 'cpu' or 'cuda'")
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition(". ")[0]
        message = f"no device {str(device)!r} here: {reason}; give cpu, or cuda where there is one"
        raise OptionError("device", device, f"device: {message}") from error
    return torch.device(device)


def check_single_gpu(option: str, device: torch.device, processes: int) -> None:
    """Raise `ValueError` where an option is wanted that is for one process on a CUDA device."""
    verb, it = ("are", "them") if option.endswith("s") else ("is", "it")
    if device.type != "cuda":
        message = f"{option} {verb} for a CUDA device, not for {device.type}: leave {it} out"
        raise OptionError(option, True, message)
    if processes > 1:
        message = f"{option} {verb} for a model in one process: leave {it} or tensor_parallel out"
        raise OptionError(option, True, message)


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """A dtype by name, or the default of a device."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = DTYPES | {kind: kind for kind in DTYPES.values()}
    if not isinstance(dtype, str | torch.dtype) or dtype not in known:
        message = f"dtype: unknown dtype {dtype!r}; known are {', '.join(DTYPES)}"
        raise OptionError("dtype", dtype, message)
    return known[dtype]
