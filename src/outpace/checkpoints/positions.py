"""The number of positions of a loaded model."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.fields import count, parse_value
from outpace.errors import OptionError
from outpace.models.config import ModelConfig

MAX_ROTARY_ENTRIES = 2**27
"""Limit on the entries of a rotary table: cosines and sines take a GiB in float32."""


def limit_positions(config: ModelConfig, max_length: int | None) -> ModelConfig:
    """Limit a configuration's positions; raise `OptionError` if the rotary tables are too large."""
    if max_length is not None:
        most = parse_value("max_length", max_length, count)
        config = replace(config, max_length=min(most, config.max_length))
    columns = sum(rope.width(size) for rope, size in config.ropes)
    if config.max_length * columns > MAX_ROTARY_ENTRIES:
        what = f"rotary tables of {config.max_length} positions, the length in config.json, take"
        message = f"max_length: {what} more than a GiB; set a smaller max_length"
        raise OptionError("max_length", config.max_length, message)
    return config
