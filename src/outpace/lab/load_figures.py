"""Figures of many requests: means and percentiles, goodput, errors by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A request and its answer as measured by a client; times are seconds of one clock."""

    began: float
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    """Times at which text arrived. Data of one read is one event, even if the server sent several
    chunks."""
    text: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    """Output tokens reported by the server."""
    forwards: int | None = None
    """Forward passes of the target, if the server reports them."""
    error: str | None = None
    """None for a complete answer; otherwise an HTTP status, `unreachable`, `dropped` (the
    connection ended before the answer), `timeout`, `failed` (an error event in the stream) or
    `malformed`."""
    error_message: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text (time to first token); None if there is no text."""
        return self.events[0] - self.began if self.events else None

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.events)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.ttft is None or self.tokens is None or self.tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended - self.began


REPORTED_PERCENTILES = (50, 90, 99)
GOODPUT_LIMITS = ("ttft", "gap", "tpot", "e2e")
"""Figures of one request that goodput may limit; `gap` is its longest gap."""

LoadFigures = dict[str, Any]


def compute_figures(
    records: Sequence[RequestRecord], seconds: float, limits: Mapping[str, float]
) -> LoadFigures:
    """Summarise the requests of `seconds` seconds; times are in milliseconds.

    Times and throughput include complete answers only; they are None if there are none. `limits`
    are milliseconds by the names of `GOODPUT_LIMITS`; goodput is relative to *all* requests.
    """
    whole = [record for record in records if record.error is None]
    tokens = sum(record.tokens or 0 for record in whole)
    counted = [record for record in whole if record.forwards]
    return {
        "requests": len(records),
        "completed": len(whole),
        "errors": dict(Counter(e.error for e in records if e.error is not None)),
        "seconds": round(seconds, 3),
        "output_tokens": tokens,
        "requests_per_second": rate_per_second(len(whole), seconds),
        "tokens_per_second": rate_per_second(tokens, seconds),
        "ttft_ms": time_distribution(record.ttft for record in whole),
        "gap_ms": time_distribution(gap for record in whole for gap in record.gaps),
        "tpot_ms": time_distribution(record.tpot for record in whole),
        "e2e_ms": time_distribution(record.e2e for record in whole),
        "tokens_per_event": ratio_distribution([(e.tokens or 0, len(e.events)) for e in whole]),
        "tokens_per_forward": ratio_distribution(
            [(e.tokens or 0, e.forwards or 0) for e in counted]
        ),
        **({"goodput": compute_goodput(records, seconds, limits)} if limits else {}),
    }


def rate_per_second(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds > 0 else None


def time_distribution(seconds: Iterable[float | None]) -> LoadFigures | None:
    return value_distribution([1e3 * value for value in seconds if value is not None])


def ratio_distribution(pairs: Sequence[tuple[int, int]]) -> LoadFigures | None:
    """Return percentiles of quotients, and the quotient of the sums as their mean."""
    parts = [(above, below) for above, below in pairs if below]
    found = value_distribution([above / below for above, below in parts])
    if found is not None:
        total = sum(above for above, _ in parts) / sum(below for _, below in parts)
        found["mean"] = round(total, 3)
    return found


def value_distribution(values: Sequence[float]) -> LoadFigures | None:
    """Return mean and linearly interpolated percentiles; None if there are no values."""
    if not values:
        return None
    percentiles = zip(
        REPORTED_PERCENTILES, np.percentile(values, REPORTED_PERCENTILES), strict=True
    )
    return {
        "mean": round(sum(values) / len(values), 3),
        **{f"p{name}": round(float(value), 3) for name, value in percentiles},
    }


def compute_goodput(
    records: Sequence[RequestRecord], seconds: float, limits: Mapping[str, float]
) -> LoadFigures:
    count = sum(meets_limits(record, limits) for record in records)
    return {
        "limits_ms": dict(limits),
        "requests_per_second": rate_per_second(count, seconds),
        "share": round(count / len(records), 4) if records else None,
    }


def meets_limits(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    """Return whether an answer is complete and within all limits; missing figures pass."""
    times = {
        "ttft": record.ttft,
        "gap": max(record.gaps, default=None),
        "tpot": record.tpot,
        "e2e": record.e2e,
    }
    late = any(1e3 * (times[name] or 0.0) > limit for name, limit in limits.items())
    return record.error is None and not late


def parse_limits(text: str) -> dict[str, float]:
    """Parse milliseconds by name, such as `ttft=200,gap=50`; `ValueError` if invalid."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT_LIMITS or name in limits or not (limit > 0 and math.isfinite(limit)):
            raise ValueError(
                f"goodput must give milliseconds for some of {', '.join(GOODPUT_LIMITS)}, as in "
                f"ttft=200,gap=50; got {part!r}"
            )
        limits[name] = limit
    return limits
