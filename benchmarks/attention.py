"""Speed of the compiled attention loop on one thread, beside the processor's peak.

    python benchmarks/attention.py --json benchmarks/results/attention.json

The peak is that of a loop of multiply-adds on as many registers as hide their latency, compiled by
`cc` for this processor and measured before each turn. A case is some rows after a context, of one
layer's shape, with random numbers; the best of all turns, in CPU time, counts for both: this is
what the processor can do, not what a busy machine leaves.
"""

from __future__ import annotations

import subprocess
import tempfile
from ctypes import CDLL, c_long
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from harness import Bar, Row, arguments, finish, prepare, show, timed
from outpace.attention.batch import AttentionBatch, RowSpan
from outpace.attention.compiled import CompiledAttention
from outpace.attention.dense import DenseAttention
from outpace.engine.cache import PAGE_SIZE

PEAK = """
typedef float numbers __attribute__((vector_size(%d)));
volatile float result;
void multiply(long times) {
    numbers sums[12], factor, term;
    for (unsigned i = 0; i < sizeof factor / 4; i++) factor[i] = .999f, term[i] = .001f;
    for (int n = 0; n < 12; n++) sums[n] = term * (float)n;
    while (times--)
#pragma GCC unroll 12
        for (int n = 0; n < 12; n++) sums[n] = sums[n] * factor + term;
    for (int n = 0; n < 12; n++) result += sums[n][0];
}
"""
PEAK_TIMES, WORK = 300_000, 10**9
"""Passes of the peak's loop, and operations of a turn."""

BARS = {"Qwen2.5-0.5B": 0.6}
"""Least share of the peak with many rows at a long context."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of a layer."""

    heads: int
    kv_heads: int
    size: int


SHAPES = {
    "Qwen2.5-0.5B": Shape(14, 2, 64),
    "SmolLM2-135M": Shape(9, 3, 64),
    "Qwen3-1.7B": Shape(16, 8, 128),
    "LLaDA-8B": Shape(32, 32, 128),
}
CASES = [(512, 0), (512, 7680), (1, 4096), (8, 4096)]
"""Rows, and slots before them."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of a sequence, one after another."""

    slots: NDArray[np.int64]


def build_peak(folder: Path) -> tuple[CDLL, int]:
    """Return the peak's loop, and the operations of one of its passes."""
    features = Path("/proc/cpuinfo")
    wide = features.exists() and " avx512f" in features.read_text()
    width = 64 if wide else 32
    (folder / "peak.c").write_text(PEAK % width)
    command = ["cc", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", folder / "peak.so", folder / "peak.c"], check=True)
    library = CDLL(str(folder / "peak.so"))
    library.multiply.argtypes = [c_long]
    return library, 12 * 2 * width // 4


def measure(shape: Shape, rows: int, start: int, rounds: int, peak: tuple[CDLL, int]) -> Row:
    """Return the best speeds of the loop and of the peak, in GFLOP/s."""
    end = start + rows
    size = -(-end // PAGE_SIZE) * PAGE_SIZE
    keys, values = torch.randn(2, shape.kv_heads, size, shape.size).transpose(1, 2)
    backend = CompiledAttention(DenseAttention([keys], [values], shape.heads))
    span = RowSpan(slice(0, rows), start, end, None, Slots(np.arange(size)))
    own = torch.arange(start, end)
    arrays = [torch.from_numpy(array) for array in backend.plan_arrays([span])]
    batch = AttentionBatch(own, own, own, None, [span], plan_arrays=arrays)
    attend, none = backend.plan_pass(batch), torch.empty(rows, 0, shape.size)
    call = partial(attend, 0, torch.randn(rows, shape.heads, shape.size), none, none)
    work = 4 * sum(span.row_visible_ends) * shape.heads * shape.size
    times = max(WORK // work, 1)
    library, operations = peak
    own_seconds, peak_seconds = [], []
    for _ in range(rounds):
        peak_seconds.append(timed(partial(library.multiply, PEAK_TIMES)).cpu)
        own_seconds.append(timed(lambda: [call() for _ in range(times)]).cpu)
    speed = work * times / min(own_seconds) / 1e9
    limit = operations * PEAK_TIMES / min(peak_seconds) / 1e9
    return {
        "rows": rows,
        "after": start,
        "ms": 1e3 * min(own_seconds) / times,
        "GFLOP/s": speed,
        "peak": limit,
        "share": speed / limit,
    }


def main() -> None:
    """Measure each case and print it with the peak."""
    parser = arguments(__doc__, rounds=8)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    options = parser.parse_args()
    prepare(options)
    tables: dict[str, list[Row]] = {}
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        peak = build_peak(Path(folder))
        for name in options.shapes:
            shape = SHAPES[name]
            tables[name] = [
                measure(shape, rows, start, options.rounds, peak) for rows, start in CASES
            ]
            show(name, tables[name])
            if name in BARS:
                share = float(tables[name][1]["share"])
                bars.append(
                    Bar(
                        what=f"{name}: share of the peak",
                        value=share,
                        limit=BARS[name],
                        at_least=True,
                    )
                )
    finish(options, tables, bars)


if __name__ == "__main__":
    main()
