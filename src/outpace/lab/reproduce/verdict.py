"""Whether measured results have the shape of a published figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from outpace.lab.compare import RatioParts, ResultRecord, bootstrap_differences, ratio_parts
from outpace.lab.reproduce.figure import Claim, Figure, Published, Scale

HOLDS, FAILS = "holds", "does not hold"
SMALL, UNTESTED = "too small to test here", "not tested"
VERDICTS = (HOLDS, FAILS, SMALL, UNTESTED)

MARGIN = 0.02
"""Loss of accuracy up to which a line that keeps the accuracy of another may be below it."""

NAMES = {
    "tokens_per_answer": ("answer_tokens",),
    "speed": ("tokens_per_second", "speedup"),
    "gain": ("speedup",),
}
"""Names of a figure of a result in published points, if they differ."""

MOST = 4
"""Pairs of results that a finding names."""

Lines = Sequence[Sequence[ResultRecord]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of `VERDICTS` on a claim, with its figures here and in the paper, and a reason."""

    claim: str
    verdict: str
    finding: str
    paper: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """95 % interval of a difference, relative unless it is one of accuracy or likelihood."""

    low: float
    high: float
    words: str

    def verdict(self, *, up: bool, expected: float | None = None) -> str:
        """Judge a direction, by the same rule for and against.

        An interval with 0 is too small a change to test, unless it excludes the `expected` one;
        so is one without width, as where neither line solves a problem.
        """
        if self.low > 0 or self.high < 0:
            return HOLDS if (self.low > 0) is up else FAILS
        has_width = self.low < self.high
        is_excluded = expected is not None and not self.low <= expected <= self.high
        return FAILS if has_width and is_excluded else SMALL


def describe(verdict: str, note: str) -> str:
    """Return a verdict and its reason in words."""
    other = " for another reason" if verdict == HOLDS and note else ""
    return f"{verdict}{other}" + (f": {note}" if note else "")


def judge_figure(
    figure: Figure, scale: str, plan: Scale, written: Mapping[str, Any]
) -> list[Verdict]:
    """Judge the claims of a figure by the content of its file."""
    results, rest = written["results"], iter(written["results"])
    lines = [list(islice(rest, count)) for count in written["lines"]]
    lines += [[]] * (len(plan.lines) - len(lines))
    verdicts = []
    for claim in figure.claims_at(scale):
        if all(lines[number - 1] for number in claim.lines):
            points = figure.pair(claim, plan.task)
            verdict, finding = judge(claim, lines, points, written.get("judge"))
            paper = " → ".join(pictured(point, claim.key) for point in points)
            notes = {HOLDS: claim.note, FAILS: claim.why}.get(verdict, {})
            verdicts.append(Verdict(claim.text, verdict, finding, paper, notes.get(scale, "")))
    is_compared = plan.is_lossless and all("equal" in each for each in results)
    return [*verdicts, judge_texts(results)] if is_compared else verdicts


def judge(
    claim: Claim, lines: Lines, points: Sequence[Published] = (), judge_name: str | None = None
) -> tuple[str, str]:
    """Judge a claim by its lines of results; return the verdict and the finding."""
    mine, *others = (select(lines[number - 1], claim.at) for number in claim.lines)
    is_judged = "likelihood" in (claim.key, *(mine[0] if claim.trend == "unbeaten" else ()))
    if is_judged and any(f"verifier={judge_name!r}" in each["method"] for each in mine):
        return UNTESTED, "the verifier itself judges the text"
    if claim.trend == "unbeaten":
        return unbeaten(mine, others[0], claim.key)
    if not others:
        verdict, words = changed(claim, [mine[0]], [mine[-1]], points)
        return verdict, f"{mine[0]['setting']} to {mine[-1]['setting']}: {words}"
    sides = [each * (len(mine) // len(each)) for each in (mine, *others)]
    verdicts, findings = [], []
    for now, before, *plain in zip(*sides, strict=True):
        verdict, words = changed(claim, [before, *plain[1:]], [now, *plain[:1]], points)
        verdicts.append(verdict)
        findings.append(f"{now['setting']}: {words}" if now["setting"] else words)
    return weakest(verdicts), "; ".join(findings)


def weakest(verdicts: Sequence[str]) -> str:
    """Return the verdict on a claim whose parts have these."""
    return next(each for each in (UNTESTED, FAILS, SMALL, HOLDS) if each in verdicts)


def select(line: Sequence[ResultRecord], setting: str) -> list[ResultRecord]:
    """Return the results of a line at a setting; all of them without one, or of a single one."""
    return [each for each in line if not setting or len(line) == 1 or each["setting"] == setting]


def changed(
    claim: Claim,
    before: Sequence[ResultRecord],
    after: Sequence[ResultRecord],
    points: Sequence[Published],
) -> tuple[str, str]:
    """Judge a change between two results, each followed by the plain one that its gain is over."""
    if claim.key in ("speed", "gain"):
        change = speed_change(before, after, claim)
    else:
        change = figure_change(before[0], after[0], claim.key)
    if isinstance(change, str):
        return UNTESTED, change
    if claim.trend == "kept":
        kept = change.low > -MARGIN
        return HOLDS if kept else FAILS if change.high < 0 else SMALL, change.words
    expected = None
    if points and claim.factor == 1:
        a, b = (published_value(point, claim.key)[1] for point in points)
        expected = (b - a) / 100 if claim.key == "accuracy" else b / a - 1
    return change.verdict(up=claim.trend in ("rises", "higher"), expected=expected), change.words


def speed_change(
    before: Sequence[ResultRecord], after: Sequence[ResultRecord], claim: Claim
) -> Change | str:
    """Return how a speed or gain changes, beyond the claimed factor, or why that is not known."""
    if claim.key == "speed":
        values = [each[0][speed_of(each[0])] for each in (before, after)]
    else:
        values = [math.exp(log_ratio(*each)[0]) for each in (before, after)]
    words = " → ".join(shown(value, claim.key) for value in values)
    results = [each["faster"] for each in (*before, *after)]
    if any(faster and not faster["interval"] for faster in results):
        return f"{words}; fewer than five rounds have no interval"
    ratio = log_ratio(after[0], before[0], *after[1:], inverse=before[1:])
    value, low, high = map(math.exp, ratio)
    words += f", {value:.2f} times, 95 % {low:.2f} … {high:.2f}"
    return Change(low / claim.factor - 1, high / claim.factor - 1, words)


def log_ratio(
    result: ResultRecord, *over: ResultRecord, inverse: Sequence[ResultRecord] = ()
) -> tuple[float, float, float]:
    """Return the logarithm of a speed over others, times those of `inverse`, and its interval.

    Speeds and intervals are those relative to the first line. The errors of several are added as
    if independent, although each has that of the first line.
    """
    value, squares = 0.0, [0.0, 0.0]
    for sign, each in [(1, result), *((-1, o) for o in over), *((1, i) for i in inverse)]:
        if each["faster"] is not None:  # of another line than the first
            middle = math.log(each["faster"]["ratio"])
            low, high = map(math.log, each["faster"]["interval"] or [each["faster"]["ratio"]] * 2)
            value += sign * middle
            for end, error in enumerate((middle - low, high - middle)[::sign]):
                squares[end] += error**2
    return value, value - math.sqrt(squares[0]), value + math.sqrt(squares[1])


def figure_change(before: ResultRecord, after: ResultRecord, key: str) -> Change | str:
    """Return how a figure of single answers changes, or why that is not known."""

    def parts_of(result: ResultRecord) -> dict[str, RatioParts]:
        return {name: parts for name, parts in answer_parts(result).items() if name == key}

    difference = bootstrap_differences(before, after, parts_of).get(key)
    if difference is None:
        return f"no {key} of single answers"
    low, high = difference.low, difference.high
    parts = [answer_parts(each)[key] for each in (before, after)]
    values = [float(above.sum() / below.sum()) for above, below in parts]
    scale = 100 if key == "accuracy" else 1
    words = " → ".join(shown(value, key) for value in values)
    words += f", 95 % {scale * low:+.2f} … {scale * high:+.2f}"
    size = 1.0 if key in ("accuracy", "likelihood") else values[0]
    return Change(low / size, high / size, words)


def answer_parts(result: ResultRecord) -> dict[str, RatioParts]:
    """Return the figures that single answers have, also their length and seconds."""
    tokens, seconds = (np.array(result["samples"][key], float) for key in ("tokens", "seconds"))
    ones = np.ones_like(tokens)
    return {**ratio_parts(result), "tokens_per_answer": (tokens, ones), "latency": (seconds, ones)}


def shown(value: float, key: str) -> str:
    if key == "accuracy":
        return f"{100 * value:.1f} %"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def judge_texts(results: Sequence[ResultRecord]) -> Verdict:
    """Judge whether all lines give the texts of the first one."""
    unequal = {each["line"]: each["equal"] for each in results if each["equal"] < 1}
    found = "; ".join(f"{line}: {100 * share:.1f} %" for line, share in unequal.items())
    verdict = FAILS if unequal else HOLDS
    return Verdict("all texts equal those of the first line", verdict, found or "all equal")


def published_value(point: Published, key: str) -> tuple[str, float]:
    """Return the name and the value of a claim's figure in a published point."""
    name = next(name for name in NAMES.get(key, (key,)) if name in point)
    return name, point[name]


def pictured(point: Published, key: str) -> str:
    name, value = published_value(point, key)
    unit = {"accuracy": " %", "speedup": " ×"}.get(name, "")
    return f"{value:g}{unit}"


def speed_of(result: ResultRecord) -> str:
    return "tokens_per_cpu_second" if result["clock"] == "cpu" else "tokens_per_second"


def unbeaten(
    mine: Sequence[ResultRecord], other: Sequence[ResultRecord], key: str
) -> tuple[str, str]:
    """Judge whether no setting of the other line is as accurate and fast as one of this."""
    pairs = [(m, o, *stands(m, o, key)) for m in mine for o in other]
    worst = weakest([each[2] for each in pairs])
    found = [
        f"{m['setting']} over {o['setting'] or o['line']}: {words}".strip()
        for m, o, verdict, words in pairs
        if verdict == worst
    ]
    more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
    return worst, "; ".join(found[:MOST]) + more


def stands(mine: ResultRecord, other: ResultRecord, key: str) -> tuple[str, str]:
    """Return whether a result is surely better than another in speed or accuracy, and how.

    It is beaten if it is surely worse in one of them, and not better in the other.
    """
    keys = [key, "likelihood" if "likelihood" in mine else "accuracy"]
    claims = [Claim(text="", line=1, trend="higher", key=each) for each in keys]
    found = [changed(claim, [other], [mine], ()) for claim in claims]
    for verdict in (HOLDS, UNTESTED):
        for each in found:
            if each[0] == verdict:
                return each
    keys[0] = speed_of(mine) if key == "speed" else key
    is_beaten = FAILS in dict(found) and not any(mine[each] > other[each] for each in keys)
    return FAILS if is_beaten else SMALL, "; ".join(words for _, words in found)
