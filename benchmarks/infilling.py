"""Holes in the middle of worked solutions: what is right of a hole, seen and not seen.

    python benchmarks/infilling.py --json benchmarks/results/infilling.json

From held-out stories the sentence in the middle of the solution is removed, and a hole of as many
tokens is filled with the question as prompt. `fill` sees what stands left and right of the hole;
`prefix` is the same model and method that sees what stands left of it alone. `sentence` does not
know the length: its hole takes up to twice as many tokens, and its regular expression is that of
any sentence. An answer is right if its equation is the one that was removed, true if it has one
equation and that holds, and whole if it is one sentence. Greedy, on the CPU.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import harness
from harness import Bar, Row
from outpace import LLM, Hole, Output
from outpace.api.options import Options
from outpace.data.generated import story
from outpace.methods import APD, D2F, Diffusion, FastDLLM, LeftToRight, Method, WeDLM

EQUATION = re.compile(r"([0-9]+)([-+*/])([0-9]+)=<<\1\2\3=([0-9]+)>>\4(?![0-9])")
RIGHT = 0.9
SENTENCE = r" [^.]+\."

Side = Literal["fill", "sentence", "prefix"]


@dataclass(frozen=True, slots=True)
class Gap:
    """A solution without the sentence in its middle."""

    question: str
    before: str
    removed: str
    after: str


def gaps(count: int) -> Iterator[Gap]:
    """Solutions of three sentences or more, of held-out stories."""
    start = 0
    while count > 0:
        (problem,) = story.story_problems("test", 1, start=start)
        start += 1
        body, mark, result = problem.answer.partition("\n#### ")
        sentences = re.split(r"(?<=\.)(?= )", body)
        if len(sentences) >= 3:
            middle = len(sentences) // 2
            yield Gap(
                problem.question,
                "".join(sentences[:middle]),
                sentences[middle],
                "".join(sentences[middle + 1 :]) + mark + result,
            )
            count -= 1


def equation(text: str) -> tuple[str, ...] | None:
    """The equation of a sentence, if it has one and no more."""
    found = EQUATION.findall(text)
    return found[0] if len(found) == 1 and text.count("<<") == 1 else None


def is_true(found: tuple[str, ...] | None) -> bool:
    """Whether an equation holds."""
    if found is None:
        return False
    left, op, right, result = found
    a, b, c = int(left), int(right), int(result)
    return {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": a == b * c}[op]


def asked(llm: LLM, gap: Gap, side: Side, method: Method) -> tuple[str, Options]:
    """A question, and the cloze that answers it."""
    size = len(llm.text.encode_plain(gap.removed))
    hole = Hole(up_to=2 * size, regex=SENTENCE) if side == "sentence" else Hole(size)
    after = [] if side == "prefix" else [gap.after]
    cloze: list[str | Hole] = [gap.before, hole, *after]
    return gap.question, Options(method=method, cloze=cloze, temperature=0.0, top_p=1.0)


def row(llm: LLM, side: Side, method: Method, some: Sequence[Gap]) -> Row:
    """Fill the gaps in one way, and count."""
    began = time.process_time()
    served = llm.serve([asked(llm, gap, side, method) for gap in some], batch=16)
    outputs = [output for _, output in sorted(served, key=lambda entry: entry[0])]
    seconds = time.process_time() - began
    pairs = [(gap, text_of(output)) for gap, output in zip(some, outputs, strict=True)]
    right = sum(equation(text) == equation(gap.removed) for gap, text in pairs) / len(pairs)
    return {
        "model": llm.name,
        "side": side,
        "stories": len(pairs),
        "right": round(right, 4),
        "standard_error": round(math.sqrt(right * (1 - right) / len(pairs)), 4),
        "true": sum(is_true(equation(text)) for _, text in pairs) / len(pairs),
        "whole": sum(bool(re.fullmatch(SENTENCE, text)) for _, text in pairs) / len(pairs),
        "forwards": sum(output.forwards for output in outputs) / len(pairs),
        "cpu_seconds": round(seconds / len(pairs), 3),
        "method": repr(method),
    }


def text_of(output: Output) -> str:
    """What stands in the hole of the sentence."""
    assert output.holes is not None
    return output.holes[0]


def settings() -> Iterator[tuple[str, Method, tuple[Side, ...]]]:
    """Models of the zoo, ways to decode them, and what they see."""
    yield "tiny-dream", LeftToRight(), ("fill", "sentence", "prefix")
    for method in DREAM:
        yield "tiny-dream", method, ("fill", "prefix")
    yield "tiny-llada", LeftToRight(), ("fill", "prefix")
    yield "tiny-d2f", D2F(block=64), ("fill", "prefix")
    yield "tiny-wedlm", WeDLM(window=64), ("fill", "prefix")


DREAM: tuple[Method, ...] = (
    Diffusion(order="entropy", eps=0.0),
    Diffusion(order="confidence", eps=0.0),
    FastDLLM(cache=None),
    APD(verifier="tiny-aux"),
)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """What the best method of `tiny-dream` restores."""
    own = (r["right"] for r in rows if r["model"] == "tiny-dream" and r["side"] == "fill")
    best = max(own, default=0.0)
    return [Bar(what="right equations, tiny-dream, best", value=best, limit=RIGHT, at_least=True)]


def main() -> None:
    """Fill in all ways, story by story the same."""
    parser = harness.arguments(__doc__, rounds=None)
    parser.add_argument("--limit", type=int, default=100, help="stories (100)")
    parser.add_argument("--only", help="models, with commas between")
    options = parser.parse_args()
    harness.prepare(options)
    rows = results(options)
    harness.show("right equations", [{k: r[k] for k in r if k != "stories"} for r in rows])
    harness.finish(options, {"results": rows}, bars(rows))


def results(options: argparse.Namespace) -> list[Row]:
    """A row for each model, method and side."""
    some, rows = list(gaps(options.limit)), list[Row]()
    llms: dict[str, LLM] = {}
    for model, method, sides in settings():
        if options.only and model not in options.only.split(","):
            continue
        if model not in llms:
            llms[model] = LLM(model)
        llm = llms[model]
        for side in sides:
            rows.append(row(llm, side, method, some))
            harness.save(options, {"results": rows}, [])
    return rows


if __name__ == "__main__":
    main()
