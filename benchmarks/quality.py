"""What matrices of 8 bits cost: every method on the zoo in float32 and in int8, in one run.

    python benchmarks/quality.py --json benchmarks/results/quality.json

Held-out story problems, greedy. For each method: accuracy and tokens per forward in both, and how
many answers and how many tokens (up to the first that differs) are those of float32. Methods that
verify must give the text that the same int8 model says token by token. Then mixed requests of all
methods, greedy and sampled, run together and each alone, and must give the same tokens. Lengths of
drafts are fixed, so that no figure depends on the speed of the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from harness import Bar, Row, arguments, finish, prepare, save, show
from methods import POINTS
from outpace import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.lab.protocol import Question
from outpace.lab.run import questions_of
from outpace.methods import Autoregressive, DFlash, Eagle, Method, Speculative, WeDLM

SIDES: dict[str, str | None] = {"float32": None, "int8": "int8"}
ACCURACY, FORWARDS = 1.0, 0.05
"""Points of accuracy, and part of the tokens per forward, that int8 may cost."""

DRAFTED = 8
"""Tokens that are drafted at a time."""

LENGTHS = 16, 48
"""Least and most tokens of a mixed request."""

Pair = Mapping[str, LLM]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A method on the model that was trained for it."""

    name: str
    model: str
    method: Method

    @property
    def lossless(self) -> bool:
        """Whether it says what the model says token by token."""
        verifies = isinstance(self.method, WeDLM) and self.method.verify
        return isinstance(self.method, Speculative | DFlash | Eagle) or verifies


def entries() -> list[Entry]:
    """All of them, and the causal models token by token; with drafts of a fixed length."""
    found = [Entry(name="autoregressive", model="tiny-wedlm", method=Autoregressive())]
    for point in POINTS:
        method = point.method
        if isinstance(method, Speculative | DFlash):
            method = replace(method, tokens=DRAFTED)
        name = ", ".join(filter(None, (point.kind, point.setting)))
        found.append(Entry(name=name, model=point.model, method=method))
    return found


def chosen(names: Sequence[str]) -> list[Entry]:
    """Methods whose names begin so, and what the lossless ones among them are held against."""
    every = entries()
    found = [entry for entry in every if entry.name.startswith(tuple(names))]
    models = {entry.model for entry in found}
    return [
        entry
        for entry in every
        if entry in found or entry.model in models and isinstance(entry.method, Autoregressive)
    ]


def answers(llm: LLM, method: Method, given: Sequence[Question], tokens: int) -> list[Output]:
    """The greedy answers."""
    prompts = [question.prompt for question in given]
    return llm.generate(prompts, method=method, max_tokens=tokens, temperature=0.0)


def kept(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens up to the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def figures(outputs: Sequence[Output], given: Sequence[Question]) -> tuple[float, float]:
    """Accuracy in percent, and tokens per forward."""
    right = sum(bool(q.judge_answer(o.text)) for q, o in zip(given, outputs, strict=True))
    forwards = sum(output.forwards for output in outputs)
    return 100 * right / len(given), sum(len(output.ids) for output in outputs) / forwards


def compared(entry: Entry, found: Mapping[str, list[Output]], given: Sequence[Question]) -> Row:
    """One method in float32 and in int8."""
    exact, small = (found[side] for side in SIDES)
    row: Row = {"model": entry.model, "method": entry.name, "problems": len(given)}
    for side in SIDES:
        accuracy, pace = figures(found[side], given)
        row |= {f"{side}: accuracy": accuracy, f"{side}: tokens per forward": pace}
    both = list(zip(small, exact, strict=True))
    row["equal answers"] = sum(a.ids == b.ids for a, b in both) / len(both)
    row["equal tokens"] = sum(kept(a.ids, b.ids) for a, b in both) / sum(len(a.ids) for a in small)
    return row


def bars_of(row: Row) -> list[Bar]:
    """What int8 may cost a method."""
    name = f"{row['model']}, {row['method']}"
    lost = abs(row["float32: accuracy"] - row["int8: accuracy"])
    change = abs(row["int8: tokens per forward"] / row["float32: tokens per forward"] - 1)
    return [
        Bar(what=f"{name}: points of accuracy from float32", value=lost, limit=ACCURACY),
        Bar(what=f"{name}: change of tokens per forward", value=change, limit=FORWARDS),
    ]


def mixed(llm: LLM, methods: Sequence[Method], count: int, seed: int) -> int:
    """How many of so many requests say something else together than alone."""
    rng = Random(seed)
    questions = questions_of("story", 200)
    requests = [
        (
            rng.choice(questions).prompt,
            Options(
                method=rng.choice(methods),
                max_tokens=rng.randint(*LENGTHS),
                temperature=rng.choice([0.0, 0.0, 0.8]),
                seed=rng.randint(0, 9),
            ),
        )
        for _ in range(count)
    ]
    together = dict(llm.serve(requests))
    alone = [llm.generate(prompt, **options)[0] for prompt, options in requests]
    return sum(together[number].ids != output.ids for number, output in enumerate(alone))


def measure(options: argparse.Namespace) -> tuple[dict[str, list[Row]], list[Bar]]:
    """All methods, then all mixed requests."""
    tables: dict[str, list[Row]] = {"methods": [], "mixed": []}
    bars: list[Bar] = []
    given = questions_of("story", options.limit)
    every = chosen(options.only)
    plain: dict[str, list[Output]] = {}
    for number, model in enumerate(dict.fromkeys(entry.model for entry in every)):
        llms = {side: LLM(model, quantize=kind, cache_gib=0.25) for side, kind in SIDES.items()}
        own = [entry for entry in every if entry.model == model]
        for entry in own:
            found = {
                side: answers(llm, entry.method, given, options.max_tokens)
                for side, llm in llms.items()
            }
            tables["methods"].append(compared(entry, found, given))
            bars += bars_of(tables["methods"][-1])
            if isinstance(entry.method, Autoregressive):
                plain[model] = found["int8"]
            if entry.lossless:
                other = sum(
                    a.ids != b.ids for a, b in zip(found["int8"], plain[model], strict=True)
                )
                what = f"{model}, {entry.name}: int8 answers that are not its own greedy ones"
                bars.append(Bar(what=what, value=other, limit=0))
        count = options.mixed * len(own) // len(every)
        for side, llm in llms.items():
            differing = mixed(llm, [entry.method for entry in own], count, number)
            row = {"model": model, "dtype": side, "requests": count, "differing": differing}
            tables["mixed"].append(row)
        what = f"{model}: int8 requests that say something else together"
        bars.append(Bar(what=what, value=tables["mixed"][-1]["differing"], limit=0))
        save(options, tables, bars)
    return tables, bars


def main() -> None:
    """Measure, show and write."""
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--limit", type=int, default=500, help="problems (500)")
    parser.add_argument("--mixed", type=int, default=1000, help="mixed requests (1000)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (128)")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of methods' names")
    options = parser.parse_args()
    if not chosen(options.only):
        names = ", ".join(dict.fromkeys(entry.name for entry in entries()))
        parser.error(f"--only {' '.join(options.only)} names none of {names}")
    prepare(options)
    tables, bars = measure(options)
    for title, rows in tables.items():
        show(title, rows)
    finish(options, tables, bars)


if __name__ == "__main__":
    main()
