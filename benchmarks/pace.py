"""Methods that a `Pace` turns, beside autoregressive decoding and their own fixed settings.

Story problems, greedy, so many at a time, on the models of the zoo; a method and what it is held
against take turns in one process, and a ratio is the median of those of the rounds. What is
compared are tokens per second of CPU time, which the `Pace` is told as well, so that neighbours on
the machine do not count. The rounds that warm up are those in which it learns most. No method may
be slower than autoregressive decoding of the same model, and at one request at a time none than the
best of its fixed settings. A diffusion model is held against the autoregressive `tiny-ar`. One
command measures all concurrencies and writes each as it ends.

    python benchmarks/pace.py --json benchmarks/results/pace.json

With `--model` and `--draft` it measures `Speculative` with published models instead, one request
at a time: autoregressive decoding, fixed draft lengths and "auto" take turns at every prompt.
"auto" starts without any measurement in every round, so that what it takes to learn counts.

    python benchmarks/pace.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf \
        --draft qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --quantize int8 --data HumanEval.jsonl.gz \
        --threads 2 --tokens 160 --rounds 1 --json benchmarks/results/pace-published.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from checkpoints import load
from draft_lengths import measure_lengths
from harness import (
    Bar,
    Clock,
    Row,
    Timing,
    alternate,
    arguments,
    finish,
    prepare,
    save,
    seconds,
    show,
)
from outpace import LLM, Output
from outpace.api.options import Options
from outpace.lab.run import questions_of
from outpace.methods import APD, D2F, Autoregressive, DFlash, Eagle, Method, Speculative, WeDLM

LEAST, FIXED = 0.97, 0.95
"""Tokens per second over those of autoregressive decoding, and of the best fixed setting."""

FEWEST = 6
"""Requests of a run, at least."""

LEARNING = 3
"""Rounds in which a `Pace` learns before any is timed, the one that warms up left out."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method of automatic draft length, fixed settings, and what it is compared with."""

    model: str
    method: Method
    fixed: Mapping[str, Method] = field(default_factory=dict)
    beside: str | None = None


def eagle(depth: int, *, width: int = 10, nodes: int = 60) -> Eagle:
    """A draft of that many levels and one."""
    return Eagle(draft="tiny-eagle", depth=depth, width=width, nodes=nodes)


def wedlm(window: int, *, verify: bool, least: int | None = None) -> WeDLM:
    """A window of so many slots."""
    return WeDLM(window=window, entropy=0.8 if verify else 0.4, verify=verify, least=least)


def apd(lookahead: int, least: int | None = None) -> APD:
    """So many masks; on these problems a window of one token does as well as one of sixteen."""
    return APD(verifier="tiny-aux", ratio=0.3, window=1, lookahead=lookahead, least=least)


CASES = {
    "Speculative": Case(
        model="tiny-ar",
        method=Speculative(draft="tiny-aux", tokens=8),
        fixed={f"tokens={n}": Speculative(draft="tiny-aux", tokens=n) for n in (2, 4, 8)},
    ),
    "DFlash": Case(
        model="tiny-ar",
        method=DFlash(draft="tiny-dflash", tokens=15),
        fixed={f"tokens={n}": DFlash(draft="tiny-dflash", tokens=n) for n in (3, 7, 15)},
    ),
    "Eagle, chain": Case(
        model="tiny-ar",
        method=eagle(7, width=1),
        fixed={f"depth={n}": eagle(n, width=1) for n in (1, 3, 7)},
    ),
    "Eagle, 16 nodes": Case(
        model="tiny-ar",
        method=eagle(7, nodes=16),
        fixed={f"depth={n}": eagle(n, nodes=2 * n + 2) for n in (1, 3, 7)},
    ),
    "WeDLM, verified": Case(
        model="tiny-wedlm",
        method=wedlm(16, verify=True),
        fixed={f"window={n}": wedlm(n, verify=True) for n in (4, 8, 16)},
    ),
    "WeDLM": Case(
        model="tiny-wedlm",
        method=wedlm(16, verify=False, least=1),
        fixed={f"window={n}": wedlm(n, verify=False) for n in (4, 8, 16)},
    ),
    "APD": Case(
        model="tiny-dream",
        method=apd(16, least=1),
        fixed={f"lookahead={n}": apd(n) for n in (4, 8, 16)},
        beside="tiny-ar",
    ),
    "D2F": Case(
        model="tiny-d2f",
        method=D2F(add=0.1, confidence=0.95, least=1),
        fixed={"blocks": D2F(add=0.1, confidence=0.95)},
        beside="tiny-ar",
    ),
}


@dataclass(slots=True)
class Side:
    """A method on a model, with a `Pace` or without, and its answers."""

    llm: LLM
    method: Method
    auto: bool
    outputs: list[Output] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def speeds(self, timings: Sequence[Timing], clock: Clock = "cpu") -> list[float]:
        """Tokens per second in each round."""
        counted = self.tokens[-len(timings) :]
        taken = [seconds(timing, clock) for timing in timings]
        return [tokens / each for tokens, each in zip(counted, taken, strict=True)]

    @property
    def draft_length(self) -> float:
        """Mean number of tokens that cycles proposed; 0 where nothing decides."""
        steps = [step for output in self.outputs for step in output.steps]
        found = [
            step.draft_length
            for step in steps
            if step.draft_length is not None and step.model == "target"
        ]
        return statistics.fmean(found) if found else 0.0


def run_of(side: Side, tokens: int, batch: int) -> Callable[[], None]:
    """All requests once, `batch` at a time, with so many tokens at most."""
    prompts = [question.prompt for question in questions_of("story", max(batch, FEWEST))]
    asked: Options = {"method": side.method, "max_tokens": tokens, "temperature": 0.0}

    def run() -> None:
        side.llm.engine.pace = "auto" if side.auto else "off"
        served = dict(side.llm.serve(((prompt, asked) for prompt in prompts), batch=batch))
        side.outputs = [served[number] for number in sorted(served)]
        side.tokens.append(sum(len(output.ids) for output in side.outputs))

    return run


def sides_of(name: str, case: Case, llms: Mapping[str, LLM], fixed: bool) -> dict[str, Side]:
    """What takes turns: the baseline, the case and, if wanted, its fixed settings."""
    base = case.beside or case.model
    sides = {base: Side(llms[base], Autoregressive(), False)}
    sides[name] = Side(llms[case.model], case.method, True)
    for setting, method in case.fixed.items() if fixed else ():
        sides[setting] = Side(llms[case.model], method, False)
    return sides


def measure(
    name: str,
    case: Case,
    llms: Mapping[str, LLM],
    *,
    batch: int,
    tokens: int,
    rounds: int,
    fixed: bool,
    clock: Clock = "cpu",
    least: float = LEAST,
) -> tuple[Row, list[Bar]]:
    """A case at one concurrency, beside its fixed settings if wanted."""
    sides = sides_of(name, case, llms, fixed)
    runs = {side: run_of(sides[side], tokens, batch) for side in sides}
    for _ in range(LEARNING):
        runs[name]()
    timings = alternate(runs, rounds)
    speeds = {side: sides[side].speeds(timings[side], clock) for side in sides}
    base, ours, *own = speeds
    best = max(own, key=lambda side: statistics.median(speeds[side]), default="")
    ratios, over = (
        [a / b for a, b in zip(speeds[ours], speeds[side], strict=True)] if side else []
        for side in (base, best)
    )
    pairs = zip(sides[ours].outputs, sides[base].outputs, strict=True)
    row: Row = {
        "method": name,
        "concurrency": batch,
        "tokens per second": statistics.median(speeds[ours]),
        "autoregressive": statistics.median(speeds[base]),
        "ratio": statistics.median(ratios),
        "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "mean draft length": sides[ours].draft_length,
        "equal texts": sum(a.ids == b.ids for a, b in pairs) / len(sides[ours].outputs),
        "best fixed": best,
        "over best fixed": statistics.median(over) if over else 0.0,
    }
    what = f"{name}, {batch} at a time: over"
    bars = [bar(f"{what} autoregressive", row["ratio"], least)]
    if over:
        bars.append(bar(f"{what} {best}", row["over best fixed"], FIXED))
    return row, bars


def bar(what: str, value: float, limit: float) -> Bar:
    """A ratio of speeds that must not be smaller."""
    return Bar(what=what, value=value, limit=limit, at_least=True)


def models_of(cases: Mapping[str, Case], make: Callable[[str], LLM] = load) -> dict[str, LLM]:
    """Every model once, with all that its methods need."""
    names = dict.fromkeys(
        name for case in cases.values() for name in (case.beside or case.model, case.model)
    )
    llms = {name: make(name) for name in names}
    for case in cases.values():
        for method in (case.method, *case.fixed.values()):
            llms[case.model].pair(method)
    return llms


def chosen(words: Sequence[str] | None) -> dict[str, Case]:
    """The cases whose names begin with one of some words; all without any."""
    found = {
        name: case
        for name, case in CASES.items()
        if words is None or name.lower().startswith(tuple(word.lower() for word in words))
    }
    if not found:
        raise SystemExit(f"no case begins with {words}; there are: {'; '.join(CASES)}")
    return found


def measure_published(options: argparse.Namespace) -> None:
    """Load a model with its draft, measure draft lengths and write them after every prompt."""
    if options.draft is None:
        raise SystemExit("--model needs --draft, the file of a draft with the same tokenizer")
    llm = LLM(
        options.model,
        Speculative(draft=options.draft),
        device="cpu",
        quantize=options.quantize,
        prefix_cache=False,
    )
    llm.engine.clock = time.process_time
    rows: list[Row] = []
    bars: list[Bar] = []
    for rows in measure_lengths(llm, options):
        speeds = {row["setting"]: row["tokens per CPU second"] for row in rows}
        best = max(speeds.keys() - {"auto"}, key=speeds.__getitem__)
        bars = [
            bar("auto over autoregressive", speeds["auto"] / speeds["autoregressive"], LEAST),
            bar(f"auto over {best}, the best setting", speeds["auto"] / speeds[best], FIXED),
        ]
        save(options, {"lengths": rows}, bars)
    show("draft lengths", rows)
    finish(options, {"lengths": rows}, bars)


def main() -> None:
    """Measure all concurrencies of the zoo, or draft lengths of published models."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (64)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64], help="at a time")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of cases")
    parser.add_argument("--model", help="published model to measure draft lengths of")
    parser.add_argument("--draft", help="its draft")
    parser.add_argument("--quantize", choices=["int8"], help="matrices of both (none)")
    parser.add_argument("--data", help="HumanEval.jsonl.gz; without, story problems are asked")
    parser.add_argument("--prompts", type=int, default=6, help="of --data (6)")
    parser.add_argument(
        "--fixed", type=int, nargs="+", default=[2, 4, 6, 8], help="draft lengths beside auto"
    )
    options = parser.parse_args()
    prepare(options)
    if options.model is not None:
        measure_published(options)
        return
    cases = chosen(options.only)
    llms = models_of(cases)
    for llm in llms.values():
        llm.engine.clock = time.process_time
    rows: list[Row] = []
    bars: list[Bar] = []
    for batch in options.batch:
        for name, case in cases.items():
            row, marks = measure(
                name,
                case,
                llms,
                batch=batch,
                tokens=options.tokens,
                rounds=options.rounds,
                fixed=batch == 1,
            )
            rows.append(row)
            bars += marks
        show(f"{batch} at a time", rows[-len(cases) :])
        save(options, {"pace": rows}, bars)
    finish(options, {"pace": rows}, bars)


if __name__ == "__main__":
    main()
