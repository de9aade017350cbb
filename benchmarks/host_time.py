"""Share of a decode that is not spent in the models: methods, packing, bookkeeping, text.

Problems of the test split are decoded alone and 32 at a time: by tiny-ar token by token, and by
tiny-dream, with tiny-aux as the verifier, with LeftToRight and APD. Host time is the wall time of
the whole run less what the runners spent in models, heads and reads; reading and writing text is
part of it. The median of the rounds is reported, also per forward: what one request gives one model
in one pass. Bars are on the default settings of the methods.

    python benchmarks/host_time.py --json benchmarks/results/host_time.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from checkpoints import load
from harness import Bar, Row, arguments, finish, prepare, show
from outpace import LLM
from outpace.lab.run import questions_of
from outpace.methods import APD, Autoregressive, LeftToRight, Method

LIMITS = {1: 0.10, 32: 0.15}
"""Share of host time by the number of requests."""

UNIT = "host us per forward"

MICROSECONDS = {"Autoregressive": 25, "APD": 60}
"""Host time per forward of many requests."""

VERIFIER = "tiny-aux"
METHODS: dict[str, tuple[str, Method]] = {
    "Autoregressive": ("tiny-ar", Autoregressive()),
    "LeftToRight": ("tiny-dream", LeftToRight()),
    "APD": ("tiny-dream", APD(verifier=VERIFIER)),
    "LeftToRight, window 16, lookahead 32": ("tiny-dream", LeftToRight(window=16, lookahead=32)),
    "APD, window 16, lookahead 32": ("tiny-dream", APD(verifier=VERIFIER, window=16, lookahead=32)),
}
"""Models and methods by name; those of a name without options have bars."""


def host_share(llm: LLM, given: Sequence[Any], **options: Any) -> tuple[float, float, int]:
    """Share of host time in one run, its seconds, and the forwards of all requests and models."""
    before = sum(runner.seconds for runner in llm.runners.values())
    began = time.perf_counter()
    outputs = llm.generate(given, **options)
    seconds = time.perf_counter() - began
    within = sum(runner.seconds for runner in llm.runners.values()) - before
    return 1 - within / seconds, seconds, sum(len(output.steps) for output in outputs)


def measure(llm: LLM, name: str, method: Method, batch: int, options: argparse.Namespace) -> Row:
    """Median over the rounds of one method at one batch size."""
    given = [question.prompt for question in questions_of("story", batch)]
    settings = {"method": method, "max_tokens": options.tokens}
    host_share(llm, given, **settings | {"max_tokens": 8})
    runs = [host_share(llm, given, **settings) for _ in range(options.rounds)]
    shares = [share for share, _, _ in runs]
    seconds = statistics.median(seconds for _, seconds, _ in runs)
    forwards = runs[0][2]
    host = statistics.median(shares)
    return {
        "method": name,
        "batch": batch,
        "host share": host,
        "range": f"{min(shares):.3f}-{max(shares):.3f}",
        "seconds": seconds,
        "forwards": forwards,
        UNIT: host * seconds / forwards * 1e6,
    }


def main() -> None:
    """Measure all cases."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (64)")
    parser.add_argument("--batch", type=int, nargs="+", default=list(LIMITS), help="requests")
    options = parser.parse_args()
    prepare(options)
    rows: list[Row] = []
    bars: list[Bar] = []
    llms = {model: load(model, method) for model, method in METHODS.values()}
    for batch in options.batch:
        for name, (model, method) in METHODS.items():
            rows.append(measure(llms[model], name, method, batch, options))
            if "," not in name and batch in LIMITS:
                what = f"{name}, batch {batch}: host share"
                bars.append(Bar(what=what, value=rows[-1]["host share"], limit=LIMITS[batch]))
            if name in MICROSECONDS and batch > 1:
                what, value = f"{name}, batch {batch}: {UNIT}", rows[-1][UNIT]
                bars.append(Bar(what=what, value=value, limit=MICROSECONDS[name]))
    show("host time", rows)
    finish(options, {"host_time": rows}, bars)


if __name__ == "__main__":
    main()
