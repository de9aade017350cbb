"""Noise as a function of (seed, slot, step, column) only.

Shapes: R rows, each with a key; V columns.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NoiseKeys = NDArray[np.uint64]

WORD_MASK = 0xFFFFFFFF


def splitmix64(x: NoiseKeys) -> NoiseKeys:
    """Apply the splitmix64 finalizer (Steele et al., 2014) to 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds: NoiseKeys, steps: NoiseKeys, slots: NoiseKeys) -> NoiseKeys:
    """Return one key of 62 bits for each seed, step and slot, elementwise."""
    with np.errstate(over="ignore"):
        keys = splitmix64(seeds + np.uint64(0x9E3779B97F4A7C15))
        return splitmix64(splitmix64(keys + steps) + slots) >> np.uint64(2)


def mix_32bit(x: Tensor) -> Tensor:
    """Apply a bijection of 32-bit words (lowbias32, Wellons, 2018), in place on int64."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(WORD_MASK)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(WORD_MASK)
    return x.bitwise_xor_(x >> 16)


def uniform_from_keys(keys: Tensor, vocab: int) -> Tensor:
    """Return numbers `f32[R, vocab]` in (0, 1), a function of key and column only."""
    columns = torch.arange(vocab, device=keys.device) * 0x9E3779B1 & WORD_MASK
    low, high = keys[:, None] & WORD_MASK, keys[:, None] >> 32
    words = mix_32bit(mix_32bit(columns ^ low).bitwise_xor_(high)).float()
    # Rounding may have produced exactly 1.
    return words.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def gumbel_from_keys(keys: Tensor, vocab: int) -> Tensor:
    """Return standard Gumbel noise `f32[R, vocab]`, a function of key and column only.

    Adding it to log-probabilities and taking the arg-max samples from them. The same noise added to
    two distributions couples their samples.
    """
    # -log(1 - u) keeps full precision for small exponentials, from which the arg-max is taken.
    return uniform_from_keys(keys, vocab).neg_().log1p_().neg_().log_().neg_()
