"""Rules of which holes are certain, by more than the confidence of one prediction.

Shapes: R rows of one read group, V vocabulary, h holes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.forward import Prediction
from outpace.decoding.sampling import GroupReader, Readout, Sample, Score, token_scores
from outpace.kernels.fused import to_device

Rule = Literal["confidence", "entropy", "frechet", "klass", "credit"]
"""Confidence or entropy alone; joint certainty (Fast-dLLM++); stable or repeated predictions."""

BoolArray = NDArray[np.bool_]

CREDIT_DECAY, CREDIT_POWER, CREDIT_WEIGHT = 0.8, 0.2, 0.7
"""β, γ and α of CreditDecoding, as set in dInfer by its authors."""

MIN_LOG_PROBABILITY = -1e4
"""Clamp of the log-probabilities of banned tokens, so that their terms are finite."""

HISTORY_SCORES: tuple[Score, ...] = ("divergence", "top_token", "top_probability")
"""Scores that only rules with a history read."""


class HoleHistory:
    """Earlier predictions of holes that a rule needs; this one needs none."""

    def read(self, sample: Sample, holes: Sequence[int]) -> Sample:
        """Return how the holes are read."""
        return sample

    def record(self, holes: Sequence[int], out: Prediction) -> BoolArray:
        """Record a prediction; return which holes may be filled by their confidence."""
        return np.ones(len(holes), dtype=np.bool_)


def start_history(rule: Rule, entropy: float, divergence: float) -> HoleHistory:
    """Return the history of one request, with the bounds of two of the rules."""
    match rule:
        case "entropy":
            return LowEntropy(entropy)
        case "klass":
            return Stability(divergence)
        case "credit":
            return Credit()
    return HoleHistory()


@dataclass(frozen=True, slots=True)
class LowEntropy(HoleHistory):
    """dParallel (Chen et al., 2025) and d3LLM (Qian et al., 2026): entropies below a limit.

    Nothing of earlier predictions is needed.
    """

    limit: float

    def read(self, sample: Sample, holes: Sequence[int]) -> Sample:
        """Return a read with entropies."""
        return replace(sample, scores=tuple(dict.fromkeys((*sample.scores, "entropy"))))

    def record(self, holes: Sequence[int], out: Prediction) -> BoolArray:
        """Return which holes have a low entropy."""
        low: BoolArray = out.scores["entropy"][: len(holes)] < self.limit
        return low


@dataclass(slots=True)
class Stability(HoleHistory):
    """KLASS (Kim et al., 2025, section 4): a prediction is stable if it hardly changed twice.

    Of the last three predictions of a slot, the Kullback-Leibler divergence of each of the later
    two from the one before it must be below `bound`.
    """

    bound: float
    rows: dict[int, int] = field(default_factory=dict)
    logits: Tensor | None = None
    divergences: Mapping[int, float] = field(default_factory=dict)

    def read(self, sample: Sample, holes: Sequence[int]) -> Sample:
        """Return a read with divergences from the last prediction of each slot."""
        return StableSample(
            **vars(replace(sample, keep=True, scores=(*sample.scores, "divergence"))),
            previous=self.logits,
            rows=tuple(self.rows.get(slot, -1) for slot in holes),
        )

    def record(self, holes: Sequence[int], out: Prediction) -> BoolArray:
        """Keep this prediction for the next forward; return which holes are stable."""
        last = np.array([self.divergences.get(slot, np.inf) for slot in holes])
        self.rows, self.logits = {slot: row for row, slot in enumerate(holes)}, out.logits
        self.divergences = dict(zip(holes, out.scores["divergence"].tolist(), strict=True))
        stable: BoolArray = np.maximum(last, out.scores["divergence"]) < self.bound
        return stable


@dataclass(frozen=True, kw_only=True)
class StableSample(Sample):
    """A sample with the score `divergence` from an earlier prediction.

    Attributes:
        previous: raw logits `[q, V]` of the last forward.
        rows: row of `previous` for each wanted slot; -1 where there is none.
    """

    previous: Tensor | None
    rows: tuple[int, ...]

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return a reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        base = Sample.make_reader(plain_samples(reads), slots, device)
        parts = [read.previous for read in reads if read.previous is not None]
        begins = accumulate(
            [0 if r.previous is None else len(r.previous) for r in reads], initial=0
        )
        table = np.array(
            [
                begin + row if row >= 0 else -1
                for read, begin in zip(reads, begins, strict=False)
                for row in read.rows
            ],
            dtype=np.int64,
        )
        rows_before = to_device(table, device)
        previous = torch.cat(parts) if parts else None

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            out = base(logits, rows)
            divergence = torch.full_like(logits[:, 0], torch.inf)
            if previous is not None:
                before = rows_before[rows]
                current = log_probabilities(logits)
                change = current - log_probabilities(previous[before.clamp(min=0)])
                known = (current.exp() * change).sum(-1)
                divergence = torch.where(before >= 0, known, divergence)
            return Readout(out.tokens, out.scores | {"divergence": divergence})

        return read_chunk


@dataclass(slots=True)
class Credit(HoleHistory):
    """CreditDecoding (Wang et al., 2025): tokens predicted before are boosted.

    In each forward the credit of a slot's tokens is multiplied by β, and its most probable token
    gains its probability to the power of γ.
    """

    credits: dict[int, dict[int, float]] = field(default_factory=dict)

    def read(self, sample: Sample, holes: Sequence[int]) -> Sample:
        """Return a read of logits with credit."""
        scores: tuple[Score, ...] = (*sample.scores, "top_token", "top_probability")
        return CreditSample(
            **vars(replace(sample, scores=scores)),
            credits=tuple(self.credits.get(slot, {}) for slot in holes),
        )

    def record(self, holes: Sequence[int], out: Prediction) -> BoolArray:
        """Update the credit of the holes; all of them may be filled by their confidence."""
        tops = out.scores["top_token"].astype(np.int64).tolist()
        gains = (out.scores["top_probability"] ** CREDIT_POWER).tolist()
        for slot, token, gain in zip(holes, tops, gains, strict=True):
            credit = {t: value * CREDIT_DECAY for t, value in self.credits.get(slot, {}).items()}
            credit[token] = credit.get(token, 0.0) + gain
            self.credits[slot] = credit
        return np.ones(len(holes), dtype=np.bool_)


@dataclass(frozen=True, kw_only=True)
class CreditSample(Sample):
    """Tokens and scores of logits plus α log(1 + credit), this forward's credit included.

    The scores `top_token` and `top_probability` are those of the logits without credit. `credits`
    are those before this forward, by token, for each wanted slot.
    """

    credits: tuple[Mapping[int, float], ...]

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return a reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        base = Sample.make_reader(plain_samples(reads), slots, device)
        credits = [credit for read in reads for credit in read.credits]
        ends = [0, *accumulate(map(len, credits))]
        rows_of_entries = np.repeat(np.arange(len(credits)), list(map(len, credits)))
        tokens = np.array([token for credit in credits for token in credit], dtype=np.int64)
        values = [value * CREDIT_DECAY for credit in credits for value in credit.values()]
        entry_rows, entry_tokens = to_device(rows_of_entries, device), to_device(tokens, device)
        entry_values = to_device(np.array(values, dtype=np.float32), device)

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            top = log_probabilities(logits).exp().max(-1)
            credit = torch.zeros_like(logits, dtype=torch.float32)
            entries = slice(ends[rows.start], ends[rows.stop])
            credit[entry_rows[entries] - rows.start, entry_tokens[entries]] = entry_values[entries]
            gains = top.values.pow(CREDIT_POWER)
            credit.scatter_add_(1, top.indices[:, None], gains[:, None])
            out = base(credit.log1p_().mul_(CREDIT_WEIGHT).add_(logits), rows)
            own = token_scores(logits, out.tokens, out.scores.keys() & {"logprob"})
            raw: dict[Score, Tensor] = {
                "top_token": top.indices.float(),
                "top_probability": top.values,
            }
            return Readout(out.tokens, out.scores | own | raw)

        return read_chunk


def plain_samples(reads: Sequence[Sample]) -> list[Sample]:
    """Return the reads without the fields and scores of a subclass."""
    return [
        Sample(
            sampling=read.sampling,
            step=read.step,
            score_as_drawn=read.score_as_drawn,
            joint=read.joint,
            scores=tuple(score for score in read.scores if score not in HISTORY_SCORES),
        )
        for read in reads
    ]


def log_probabilities(logits: Tensor) -> Tensor:
    """Return finite log-probabilities `f32[R, V]`."""
    return logits.float().log_softmax(-1).clamp_(min=MIN_LOG_PROBABILITY)
