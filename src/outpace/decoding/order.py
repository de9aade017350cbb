"""Orders and schedules: which holes are filled next, and how many per forward.

Shapes: h holes. An order takes `f32[h]` scores, larger first, and returns the indices of the chosen
holes in the order of their choice. A schedule returns how many holes each of its steps fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from outpace.decoding.canvas import Canvas
from outpace.decoding.forward import FloatArray, Forward, IntArray, Prediction
from outpace.decoding.sampling import Read, noise_keys, splitmix64
from outpace.decoding.target import Rank


def rank_descending(scores: FloatArray) -> IntArray:
    return np.argsort(-scores, kind="stable")


def top_holes(scores: FloatArray, count: int = 1) -> IntArray:
    """Return the indices of the `count` largest scores."""
    return rank_descending(scores)[:count]


def above_threshold(scores: FloatArray, threshold: float) -> IntArray:
    """Return the indices of all scores above a threshold, possibly none."""
    return np.flatnonzero(scores > threshold)


def reaching_threshold(confidence: FloatArray, threshold: float) -> IntArray:
    """Return the best hole and all others that reach a threshold (Fast-dLLM, section 3.3)."""
    chosen = rank_descending(confidence)
    return chosen[: max(int((confidence >= threshold).sum()), 1)]


def within_factor(confidence: FloatArray, factor: float) -> IntArray:
    """Return the n best holes while the n-th is surer than 1 - factor / (n + 1); at least one."""
    # Fast-dLLM, section 3.3: the more tokens are accepted together, the higher all their
    # confidences must be. As in the authors' code, a single remaining hole is included.
    chosen = rank_descending(confidence)
    minima = 1 - factor / (np.arange(len(chosen)) + 2)
    minima[0] = 0
    unsure = np.flatnonzero(confidence[chosen] < minima)
    count = int(unsure[0]) if len(unsure) else len(chosen)
    return chosen if count == len(chosen) - 1 else chosen[:count]


def within_budget(scores: FloatArray, entropy: FloatArray, budget: float) -> IntArray:
    """Return the best holes whose shared entropy is within a budget; at least one."""
    # The entropy-bounded sampler of Ben-Hamu et al., 2025: the error of drawing tokens
    # independently is at most the sum of their entropies without the largest.
    chosen = rank_descending(scores)
    shared = entropy[chosen].cumsum() - np.maximum.accumulate(entropy[chosen])
    return chosen[: max(int((shared <= budget).sum()), 1)]


def rank_scores(out: Prediction, by: Rank) -> FloatArray:
    """Return the score that holes are ranked by, larger first."""
    score = out.scores[by]
    return -score if by == "entropy" else score


def slot_uniforms(seed: int, step: int, slots: Sequence[int]) -> FloatArray:
    """Return a number in (0, 1) for each slot, a function of (seed, slot, step) only."""
    slot_ids = np.asarray(slots, dtype=np.uint64)
    seeds, steps = (np.full(len(slot_ids), x % 2**64, dtype=np.uint64) for x in (seed, step))
    with np.errstate(over="ignore"):
        keys = splitmix64(noise_keys(seeds, steps, slot_ids) + np.uint64(0x9E3779B97F4A7C15))
    # 23 bits are exact in float32 and never round to 1.
    return ((keys >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)


def perturb_scores(scores: FloatArray, temperature: float, uniforms: FloatArray) -> FloatArray:
    """Perturb scores so that the best k are a draw of k holes without replacement."""
    # A hole is drawn with probability softmax(scores / temperature), by Gumbel noise (Kool et al.,
    # 2019).
    noise: FloatArray = -np.log(-np.log(uniforms))
    return scores / np.float32(temperature) + noise


def even_counts(holes: int, steps: int) -> list[int]:
    """Return equal counts, the first ones larger by the remainder (Nie et al., 2025)."""
    each, rest = divmod(holes, steps)
    return [each + (step < rest) for step in range(steps)]


def timestep_shares(steps: int, eps: float) -> FloatArray:
    """Return the fraction of the remaining holes per step, for times from 1 to `eps`."""
    # The times fall linearly, and the last step fills all. In float32, as in Dream's code, whose
    # counts depend on it.
    times = torch.linspace(1, eps, steps + 1)
    falls: FloatArray = (1 - times[1:] / times[:-1]).numpy()
    falls[-1] = 1
    return falls


def timestep_counts(holes: int, steps: int, eps: float) -> list[int]:
    """Return the counts of a time schedule (Ye et al., 2025): shares of the rest, rounded down."""
    counts = []
    for share in timestep_shares(steps, eps):
        counts.append(int(np.float32(holes) * share))
        holes -= counts[-1]
    return counts


def step_schedule(holes: int, steps: int, eps: float) -> list[tuple[int, float]]:
    """Return count and fraction of each step: by times, or even where `eps` is 0."""
    counts = timestep_counts(holes, steps, eps) if eps else even_counts(holes, steps)
    return list(zip(counts, timestep_shares(steps, eps).tolist(), strict=True))


D2F_BLOCK_SIZE = 16
"""Tokens of a block."""

D2F_ADD, D2F_ACTIVATE = 0.1, 0.95
"""Filled fraction of a block at which the next one is appended, and is fully activated."""

D2F_CONFIDENCE = 0.9
"""Tokens of a higher probability are accepted."""


def select_block_holes(
    confidence: FloatArray, ranks: FloatArray, threshold: float, *, is_active: bool
) -> IntArray:
    """Return the holes of a block above the threshold, or the best one if `is_active`."""
    chosen = above_threshold(confidence, threshold)
    return chosen if len(chosen) or not is_active else top_holes(ranks)


def filled_share(canvas: Canvas, begin: int, end: int | None = None) -> float:
    """Return the filled fraction of the slots of a block; 1 before the first block."""
    if end is None:
        return 1.0
    size = end - begin
    return (size - len(canvas.holes_within(begin, end))) / size


def forward_of_holes(canvas: Canvas, edges: list[int], read: Read) -> Forward:
    """Return a forward that predicts all holes, up to the end of the last block that has any."""
    # It starts at the first uncached block, or at the row before the first hole, which may be the
    # one that predicts it.
    start = min(edges[0], canvas.prefix_length - 1)
    end = next(edge for edge in edges if edge > canvas.holes[-1])
    return Forward(
        ids=canvas.ids[start:end],
        start=start,
        pattern=block_pattern(edges, start, end),
        predict=tuple(canvas.holes),
        read=read,
    )


def block_pattern(edges: list[int], start: int, end: int) -> tuple[int, ...]:
    """Return the lengths of the blocks between two slots."""
    bounds = [start, *(edge for edge in edges if start < edge <= end)]
    return tuple(stop - begin for begin, stop in pairwise(bounds))
