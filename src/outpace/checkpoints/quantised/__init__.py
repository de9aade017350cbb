"""Published formats of quantized weights, by `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outpace.checkpoints.fields import Fields, mapping, parse_value, shorten
from outpace.checkpoints.quantised.awq import AWQ
from outpace.checkpoints.quantised.compressed import CompressedTensors
from outpace.checkpoints.quantised.fp8 import FP8
from outpace.checkpoints.quantised.gptq import GPTQ
from outpace.checkpoints.quantised.mxfp4 import MXFP4
from outpace.checkpoints.quantised.scheme import Scheme

QUANTIZATION_FIELD = "quantization_config"
SCHEMES: Mapping[str, Callable[[Fields], Scheme]] = {
    "awq": AWQ.from_config,
    "compressed-tensors": CompressedTensors.from_config,
    "fp8": FP8.from_config,
    "gptq": GPTQ.from_config,
    "mxfp4": MXFP4.from_config,
}


def scheme_of(published: Fields) -> Scheme | None:
    """Return the quantization scheme of a checkpoint; None if it is not quantized.

    Raises:
        ValueError: For an unsupported scheme, field or value.
    """
    if published.get(QUANTIZATION_FIELD) in (None, {}, False):
        return None
    config: Any = parse_value(QUANTIZATION_FIELD, published[QUANTIZATION_FIELD], mapping)
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise ValueError(
            f"{QUANTIZATION_FIELD}: quant_method {shorten(method)} is not supported; supported: "
            f"{', '.join(SCHEMES)}, or a checkpoint that is not quantized"
        )
    try:
        return SCHEMES[method](config)
    except ValueError as error:
        raise ValueError(f"{QUANTIZATION_FIELD}: {error}") from error
