"""Published formats of quantized weights, by `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outpace.checkpoints.fields import Given, brief, checked, mapping
from outpace.checkpoints.quantised.awq import AWQ
from outpace.checkpoints.quantised.compressed import Compressed
from outpace.checkpoints.quantised.fp8 import FP8
from outpace.checkpoints.quantised.gptq import GPTQ
from outpace.checkpoints.quantised.mxfp4 import MXFP4
from outpace.checkpoints.quantised.scheme import Scheme

FIELD = "quantization_config"
SCHEMES: Mapping[str, Callable[[Given], Scheme]] = {
    "awq": AWQ.read,
    "compressed-tensors": Compressed.read,
    "fp8": FP8.read,
    "gptq": GPTQ.read,
    "mxfp4": MXFP4.read,
}


def scheme_of(published: Given) -> Scheme | None:
    """Return the quantization scheme of a checkpoint; None if it is not quantized.

    Raises:
        ValueError: For an unsupported scheme, field or value.
    """
    if published.get(FIELD) in (None, {}, False):
        return None
    config: Any = checked(FIELD, published[FIELD], mapping)
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise ValueError(
            f"{FIELD}: quant_method {brief(method)} is not supported; supported: "
            f"{', '.join(SCHEMES)}, or a checkpoint that is not quantized"
        )
    try:
        return SCHEMES[method](config)
    except ValueError as error:
        raise ValueError(f"{FIELD}: {error}") from error
