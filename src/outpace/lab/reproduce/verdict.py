"""Whether measured results have the shape of a published figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.lab.compare import Difference, ResultRecord, bootstrap_differences, speed_accuracy
from outpace.lab.reproduce.figure import Claim, Figure, Published

CHANGE = 0.05
"""Share by which a figure without an interval must change to count as changed."""

NAMES = {
    "tokens_per_answer": ("answer_tokens",),
    "speed": ("tokens_per_second", "speedup"),
    "gain": ("speedup",),
}
"""Names of a figure of a result in published points, if they differ."""

Lines = Sequence[Sequence[ResultRecord]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim holds, with its figures here and in the paper.

    `note` is the reason why it holds, if the paper has another one.
    """

    claim: str
    holds: bool
    finding: str
    paper: str = ""
    note: str = ""


def holding(holds: bool, note: str) -> str:
    """Return whether a claim holds, in words."""
    if not holds:
        return "does not hold"
    return f"holds for another reason: {note}" if note else "holds"


def judge(claim: Claim, lines: Lines) -> Verdict:
    """Judge a claim by one or two lines of results."""
    if claim.at:
        lines = [[each for each in line if each["setting"] == claim.at] for line in lines]
    mine = lines[claim.line - 1]
    key = speed_of(mine[0]) if claim.key == "speed" else claim.key
    if claim.than is None:
        holds, change = changed(mine[0], mine[-1], key, up=claim.trend == "rises")
        settings = f"{mine[0]['setting']} to {mine[-1]['setting']}"
        return Verdict(claim.text, holds, f"{settings}: {change}")
    other = lines[claim.than - 1]
    if claim.trend == "unbeaten":
        return unbeaten(claim.text, mine, other, key)
    pairs = list(zip(other, mine, strict=True))
    found = [changed(a, b, key, up=claim.trend == "higher") for a, b in pairs]
    finding = "; ".join(at(b["setting"]) + t for (_, b), (_, t) in zip(pairs, found, strict=True))
    return Verdict(claim.text, all(holds for holds, _ in found), finding)


def at(setting: str) -> str:
    return f"{setting}: " if setting else ""


def changed(before: ResultRecord, after: ResultRecord, key: str, *, up: bool) -> tuple[bool, str]:
    """Return whether a figure rose (or fell) by more than chance, and its change in words."""
    a, b = figure_of(before, key), figure_of(after, key)
    # Seconds have no interval by the questions that two runs share.
    difference = None if "second" in key else bootstrap_differences(before, after).get(key)
    if difference is not None:
        finding = f"{shown(a, key)} → {shown(b, key)}, {between(difference, key)}"
        return beyond(difference, up=up), finding
    moved = b > a * (1 + CHANGE) if up else b < a * (1 - CHANGE)
    return moved, f"{shown(a, key)} → {shown(b, key)}"


def figure_of(result: ResultRecord, key: str) -> float:
    """Return a figure of a result; its gain is the speed relative to the first line."""
    return (result["faster"]["ratio"] if key == "gain" else result[key]) or 0.0


def beyond(difference: Difference, *, up: bool) -> bool:
    return difference.low > 0 if up else difference.high < 0


def between(difference: Difference, key: str) -> str:
    scale = 100 if key == "accuracy" else 1
    return f"95 % {scale * difference.low:+.2f} … {scale * difference.high:+.2f}"


def shown(value: float, key: str) -> str:
    if key == "accuracy":
        return f"{100 * value:.1f} %"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def judge_texts(results: Sequence[ResultRecord]) -> Verdict:
    """Judge whether all lines give the texts of the first one."""
    unequal = {each["line"]: each["equal"] for each in results if each["equal"] < 1}
    found = "; ".join(f"{line}: {100 * share:.1f} %" for line, share in unequal.items())
    return Verdict("all texts equal those of the first line", not unequal, found or "all equal")


def published(figure: Figure, claim: Claim, task: str | None = None) -> str:
    """Return the figures of a claim in the paper, before and after; empty without any."""
    return " → ".join(pictured(point, claim.key) for point in figure.pair(claim, task))


def pictured(point: Published, key: str) -> str:
    name = next(name for name in NAMES.get(key, (key,)) if name in point)
    unit = {"accuracy": " %", "speedup": " ×"}.get(name, "")
    return f"{point[name]:g}{unit}"


def speed_of(result: ResultRecord) -> str:
    return "tokens_per_cpu_second" if result["clock"] == "cpu" else "tokens_per_second"


def unbeaten(
    claim_text: str, mine: Sequence[ResultRecord], other: Sequence[ResultRecord], key: str
) -> Verdict:
    """Judge whether no setting of the other line is as accurate and fast as one of this."""
    pairs = [(m, o) for m in mine for o in other if beats(o, m, key)]
    beaten = [" by ".join(each["setting"] or each["line"] for each in pair) for pair in pairs]
    finding = f"none of {len(mine)} beaten" if not beaten else f"beaten: {', '.join(beaten)}"
    return Verdict(claim_text, not beaten, finding)


def beats(one: ResultRecord, other: ResultRecord, key: str) -> bool:
    """Return whether one result is at least as accurate and fast, and better in one of both."""
    a, b = speed_accuracy(one, key), speed_accuracy(other, key)
    return a[0] >= b[0] and a[1] >= b[1] and a != b
