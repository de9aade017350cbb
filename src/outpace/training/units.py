"""Counts of parameters, and their formatting."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def format_millions(parameters: int) -> str:
    """Format a number of parameters in millions."""
    return f"{parameters / 1e6:,.2f}M"


def format_gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / 2**30:,.2f} GiB"


def count_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Return the total number of elements."""
    return sum(parameter.numel() for parameter in parameters)
