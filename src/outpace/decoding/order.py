"""Which holes are filled next, and how many in each forward.

Shapes: h holes. An order takes `f32[h]` scores, larger first, and returns the indices of the chosen
holes in the order of their choice. A schedule returns how many holes each of its steps fills.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outpace.decoding.forward import FloatArray, IntArray, Prediction
from outpace.decoding.noise import mix, noise_keys
from outpace.decoding.target import Rank


def ranked(scores: FloatArray) -> IntArray:
    """Indices from the largest score to the smallest; the leftmost of equals comes first."""
    return np.argsort(-scores, kind="stable")


def best(scores: FloatArray, count: int = 1) -> IntArray:
    """The `count` largest scores."""
    return ranked(scores)[:count]


def above(scores: FloatArray, threshold: float) -> IntArray:
    """All scores above a threshold; none may be."""
    return np.flatnonzero(scores > threshold)


def reaching(confidence: FloatArray, threshold: float) -> IntArray:
    """The best hole, and all others that reach a threshold (Fast-dLLM, section 3.3)."""
    chosen = ranked(confidence)
    return chosen[: max(int((confidence >= threshold).sum()), 1)]


def factor(confidence: FloatArray, factor: float) -> IntArray:
    """The n best holes as long as the n-th is surer than 1 - factor / (n + 1); one at least.

    Fast-dLLM, section 3.3: the more tokens are taken together, the surer all of them must be. As
    in the authors' code, a single hole that would be left over goes with the others.
    """
    chosen = ranked(confidence)
    least = 1 - factor / (np.arange(len(chosen)) + 2)
    least[0] = 0
    unsure = np.flatnonzero(confidence[chosen] < least)
    count = int(unsure[0]) if len(unsure) else len(chosen)
    return chosen if count == len(chosen) - 1 else chosen[:count]


def within_budget(scores: FloatArray, entropy: FloatArray, budget: float) -> IntArray:
    """As many of the best holes as share no more than a budget of entropy; one at least.

    The entropy-bounded sampler of Ben-Hamu et al., 2025: the error of drawing the tokens apart
    is at most the sum of their entropies without the largest.
    """
    chosen = ranked(scores)
    shared = entropy[chosen].cumsum() - np.maximum.accumulate(entropy[chosen])
    return chosen[: max(int((shared <= budget).sum()), 1)]


def rank(out: Prediction, by: Rank) -> FloatArray:
    """The score that holes are ranked by, larger first."""
    score = out.scores[by]
    return -score if by == "entropy" else score


def uniforms(seed: int, step: int, slots: Sequence[int]) -> FloatArray:
    """A number in (0, 1) for each slot: a function of (seed, slot, step), as all noise is."""
    places = np.asarray(slots, dtype=np.uint64)
    seeds, steps = (np.full(len(places), x % 2**64, dtype=np.uint64) for x in (seed, step))
    with np.errstate(over="ignore"):
        keys = mix(noise_keys(seeds, steps, places) + np.uint64(0x9E3779B97F4A7C15))
    # Of 23 bits, which are exact in float32 and never round to a one.
    return ((keys >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)


def perturbed(scores: FloatArray, temperature: float, uniforms: FloatArray) -> FloatArray:
    """Scores of which the best k are a draw of k holes without replacement.

    A hole is drawn with probability softmax(scores / temperature), by Gumbel noise (Kool et al.,
    2019).
    """
    noise: FloatArray = -np.log(-np.log(uniforms))
    return scores / np.float32(temperature) + noise


def even(holes: int, steps: int) -> list[int]:
    """Equal counts, the first ones larger by what is left over (Nie et al., 2025)."""
    each, rest = divmod(holes, steps)
    return [each + (step < rest) for step in range(steps)]


def shares(steps: int, eps: float) -> FloatArray:
    """Share of what is left that each step fills where time falls evenly from 1 to `eps`.

    The last step fills all. In float32, as in Dream's code, whose counts depend on it.
    """
    times = torch.linspace(1, eps, steps + 1)
    falls: FloatArray = (1 - times[1:] / times[:-1]).numpy()
    falls[-1] = 1
    return falls


def timesteps(holes: int, steps: int, eps: float) -> list[int]:
    """Counts of a schedule of times (Ye et al., 2025): that share of what is left, rounded down."""
    counts = []
    for share in shares(steps, eps):
        counts.append(int(np.float32(holes) * share))
        holes -= counts[-1]
    return counts


def schedule(holes: int, steps: int, eps: float) -> list[tuple[int, float]]:
    """Count and share of each step: `timesteps`, or `even` where `eps` is 0."""
    counts = timesteps(holes, steps, eps) if eps else even(holes, steps)
    return list(zip(counts, shares(steps, eps).tolist(), strict=True))
