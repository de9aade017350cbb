"""Forwards in blocks, and what a model answers them, in few letters."""

import numpy as np

from helpers import MASK
from outpace.decoding import Forward, Prediction


def predicted(tokens: str, sure: str, **ranks: list[float]) -> Prediction:
    """A digit for each hole, and `+` where it is sure, else `-` or (the surest of these) `*`."""
    confidence = {"+": 0.99, "*": 0.5, "-": 0.1}
    return Prediction(
        tokens=[int(token) for token in tokens],
        scores={
            "confidence": np.array([confidence[each] for each in sure], dtype=np.float32),
            **{name: np.array(values, dtype=np.float32) for name, values in ranks.items()},
        },
    )


def shape(forward: Forward) -> tuple[int, str, tuple[int, ...], list[int]]:
    """Where a forward starts, what it feeds, in which blocks, and what it wants."""
    fed = "".join("_" if token == MASK else str(token) for token in forward.ids)
    assert isinstance(forward.pattern, tuple)
    return forward.start, fed, forward.pattern, list(forward.predicted_slots())
