"""The column of the largest number of each row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

WIDE = 2**14
"""Columns from which on rows that lie apart are looked at one by one, and not copied first."""


def likeliest(logits: Tensor) -> Tensor:
    """What `logits.argmax(-1)` is of `logits [R, V]`: on a CPU its loop is a tenth as fast."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.argmax(-1)
    rows = logits.numpy()
    if logits.is_contiguous() or logits.shape[-1] < WIDE:
        return torch.from_numpy(np.asarray(rows.argmax(-1)))
    return torch.tensor([int(row.argmax()) for row in rows], dtype=torch.int64)
