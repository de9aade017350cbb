"""Causal forwards in two parts: rows that nobody reads may run ahead of the others."""

from dataclasses import replace

from outpace.decoding import CAUSAL, Forward


def cut_at(forward: Forward, room: int, shift: int) -> int:
    """Rows of a forward that may run ahead of the rest; 0 where it may not be cut."""
    if forward.mask != CAUSAL or forward.reach is not None or forward.context is not None:
        return 0
    predicted = forward.predicted_rows(shift)
    return min(room, int(predicted.min()) if len(predicted) else len(forward.ids) - 1)


def halves(forward: Forward, cut: int) -> tuple[Forward, Forward]:
    """A causal forward as two: the first `cut` rows, which nobody reads, and the rest."""
    positions = forward.positions
    head = replace(
        forward,
        ids=forward.ids[:cut],
        positions=None if positions is None else positions[:cut],
        predict=(),
        rows=None,
    )
    tail = replace(
        forward,
        ids=forward.ids[cut:],
        start=forward.start + cut,
        positions=None if positions is None else positions[cut:],
    )
    return head, tail
