"""Reads: how logits become tokens and scores, for the rows of many sequences at once.

Shapes: R rows of one read group, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from outpace.decoding.argmax import argmax_tokens
from outpace.decoding.joint import Joint, JointChooser
from outpace.decoding.noise import gumbel_from_keys, noise_keys
from outpace.decoding.sampling_params import PLAIN_SAMPLING, Sampling
from outpace.decoding.truncation import LogitTruncation, apply_top_k_min_p, nucleus_argmax
from outpace.kernels.fused import SamplingTensors, read_rows, runs_triton, to_device

Score = Literal[
    "confidence",
    "entropy",
    "logprob",
    "margin",
    "divergence",
    "top_token",
    "top_probability",
    "rank",
    "acceptance",
]
"""Scores of a token; `rank` belongs to the reads of `scoring`, the three before it to `rules`.

`acceptance` is that of a draft's own head, and of no read.
"""


@dataclass(slots=True)
class Readout:
    """Result of a read of `R` rows; everything `[R]` on the device."""

    tokens: Tensor
    scores: dict[Score, Tensor]


TokenScorer = Callable[[Tensor, Tensor, slice], dict[Score, Tensor]]
"""Scores the tokens `[r]` of logits `[r, V]`, which are a slice of a group's rows."""

GroupReader = Callable[[Tensor, slice], Readout]
"""Turns logits `[r, V]` of a slice of a group's rows into a readout."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """How the logits of a forward become tokens. Reads of one type are run together.

    Attributes:
        keep: whether the raw logits stay on the device as `Prediction.logits`.
        scores: further scores, each of which costs another pass over the vocabulary.
        top_logprobs: number of most probable tokens to return; None for that of the request.
        is_given: whether the tokens are given, so that the processors of a request do not apply.
    """

    keep: bool = False
    scores: tuple[Score, ...] = ()
    top_logprobs: int | None = None
    is_given: bool = False

    @property
    def needs_all_rows(self) -> bool:
        """Whether all of its rows must be read at once."""
        return False

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return a reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Sample(Read):
    """Greedy or sampled tokens. Noise is a function of (seed, slot, step), never of the batch.

    Scores use the raw logits, or with `score_as_drawn` the sampling distribution: divided by the
    temperature (unless it is 0), then truncated. A `logprob` always uses the raw logits. With
    `joint`, the tokens of all slots satisfy the constraint together.
    """

    sampling: Sampling = PLAIN_SAMPLING
    step: int = 0
    score_as_drawn: bool = False
    joint: Joint | None = None

    @property
    def needs_all_rows(self) -> bool:
        """Whether the tokens are chosen jointly."""
        return self.joint is not None

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return a reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        for read in reads:
            if read.sampling.temperature != 0 or read.scores or read.joint is not None:
                break
        else:
            return read_greedily
        if runs_triton(device) and cls.is_fusible(reads):
            return cls.make_fused_reader(reads, slots, device)
        choose = cls.make_chooser(reads, slots, device)
        judge = cls.make_scorer(reads, slots, device)

        def choose_and_score(logits: Tensor, rows: slice) -> Readout:
            tokens = choose(logits, rows)
            return Readout(tokens, judge(logits, tokens, rows))

        return choose_and_score

    @classmethod
    def is_fusible(cls, reads: Sequence[Self]) -> bool:
        """Return whether one kernel launch can produce tokens and scores, row by row."""
        return any(read.scores for read in reads) and not any(read.needs_all_rows for read in reads)

    @property
    def has_raw_scores(self) -> bool:
        """Whether all scores use the raw logits."""
        return self.sampling.is_plain or not (self.score_as_drawn and self.scores)

    @classmethod
    def make_fused_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return the same reader as one kernel launch, for logits of any dtype."""
        wanted = {score for read in reads for score in read.scores}
        noisy = NoisyChooser.from_requests(
            [r.sampling for r in reads], [r.step for r in reads], slots, device
        )
        is_drawn = np.repeat(
            [not read.has_raw_scores for read in reads], [len(each) for each in slots]
        )
        drawn_flags = to_device(is_drawn, device) if is_drawn.any() else None

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            own_flags = None if drawn_flags is None else drawn_flags[rows]
            tokens, scores = noisy.read_fused(logits, rows, drawn=own_flags)
            return Readout(tokens, {score: scores[score] for score in wanted})

        return read_chunk

    @classmethod
    def make_chooser(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Chooser:
        """Return how `reads` choose the tokens of their rows."""
        choose_rows = row_chooser(
            [r.sampling for r in reads], [r.step for r in reads], slots, device
        )
        return (
            JointChooser(choose_rows, reads, slots)
            if any(r.needs_all_rows for r in reads)
            else choose_rows
        )

    @classmethod
    def make_scorer(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> TokenScorer:
        """Return how `reads` score the tokens of their rows."""
        wanted = {score for read in reads for score in read.scores}
        if not wanted:
            return lambda logits, tokens, rows: {}
        samplings = [read.sampling if read.score_as_drawn else PLAIN_SAMPLING for read in reads]
        if all(each.is_plain for each in samplings):
            return lambda logits, tokens, rows: token_scores(logits, tokens, wanted)
        truncation = LogitTruncation.from_requests(samplings, slots, device)
        raw = wanted & {"logprob"}

        def score_chunk(logits: Tensor, tokens: Tensor, rows: slice) -> dict[Score, Tensor]:
            as_drawn = token_scores(truncation(logits, rows), tokens, wanted - raw)
            return as_drawn | token_scores(logits, tokens, raw)

        return score_chunk


GREEDY = Sample()


def read_greedily(logits: Tensor, rows: slice) -> Readout:
    """Return the most probable token of each row, without scores."""
    return Readout(argmax_tokens(logits), {})


Chooser = Callable[[Tensor, slice], Tensor]
"""Chooses a token `[r]` from each row of logits `[r, V]`, a slice of a group's rows."""


def row_chooser(
    samplings: Sequence[Sampling],
    steps: Sequence[int],
    slots: Sequence[Sequence[int]],
    device: torch.device,
) -> Chooser:
    """Return a chooser with each request's settings and noise, for the slots that it wants."""
    if all(sampling.temperature == 0 for sampling in samplings):
        return lambda logits, rows: argmax_tokens(logits)
    return NoisyChooser.from_requests(samplings, steps, slots, device)


def slot_noise_keys(
    samplings: Sequence[Sampling], steps: Sequence[int], slots: Sequence[Sequence[int]]
) -> Tensor:
    """Return the noise keys `i64[R]` of all slots that the requests want."""
    counts = [len(wanted) for wanted in slots]
    seeds = np.array([int(sampling.seed) % 2**64 for sampling in samplings], dtype=np.uint64)
    slot_ids = np.fromiter((slot for wanted in slots for slot in wanted), np.uint64, sum(counts))
    step_ids = np.array([step % 2**64 for step in steps], dtype=np.uint64)
    keys = noise_keys(np.repeat(seeds, counts), np.repeat(step_ids, counts), slot_ids)
    return torch.from_numpy(keys.astype(np.int64))


@dataclass(slots=True, kw_only=True)
class NoisyChooser:
    """Token chooser with settings and noise per row."""

    truncation: LogitTruncation
    keys: Tensor

    @classmethod
    def from_requests(
        cls,
        samplings: Sequence[Sampling],
        steps: Sequence[int],
        slots: Sequence[Sequence[int]],
        device: torch.device,
    ) -> Self:
        """Build a chooser with each request's settings and a noise key for each of its slots."""
        keys = slot_noise_keys(samplings, steps, slots).numpy()
        return cls(
            truncation=LogitTruncation.from_requests(samplings, slots, device),
            keys=to_device(keys, device),
        )

    def read_fused(
        self,
        logits: Tensor,
        rows: slice,
        guess: Tensor | None = None,
        ratio: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return tokens and all scores of the rows `rows`, computed by the kernel `read_rows`."""
        return read_rows(
            logits, self.truncation.settings_of(rows), self.keys[rows], guess, ratio, drawn
        )

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the token of each row of `logits [r, V]`, the rows `rows` of the group."""
        if runs_triton(logits.device):
            return self.read_fused(logits, rows)[0]
        settings, host_rows = (
            self.truncation.settings_of(rows),
            self.truncation.host_settings[:, rows],
        )
        tokens = argmax_tokens(logits)
        # Rows are selected by index, so greedy rows cost nothing and do not change the others.
        if len(sampled := host_rows[0].nonzero()[0]):
            sampled_rows = to_device(sampled, logits.device)
            row_settings = SamplingTensors(*(setting[sampled_rows] for setting in settings))
            scaled = logits[sampled_rows].float() / row_settings.temperature[:, None]
            noised = apply_top_k_min_p(scaled, row_settings, host_rows[:, sampled])
            noised = noised + gumbel_from_keys(self.keys[rows][sampled_rows], scaled.shape[-1])
            tokens[sampled_rows] = nucleus_argmax(scaled, noised, row_settings.top_p)
        return tokens

    def choice_probabilities(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the probabilities `f32[r, V]` with which tokens of `logits [r, V]` are chosen."""
        probabilities = torch.zeros_like(logits, dtype=torch.float32)
        probabilities.scatter_(-1, argmax_tokens(logits)[:, None], 1.0)
        if len(sampled := self.truncation.host_settings[0, rows].nonzero()[0]):
            sampled_rows = to_device(sampled, logits.device)
            probabilities[sampled_rows] = self.truncation(logits, rows)[sampled_rows].softmax(-1)
        return probabilities

    def draw_tokens(self, weights: Tensor, rows: slice) -> Tensor:
        """Draw a token `[r]` from each row of `weights [r, V]`, which need not be normalised."""
        return argmax_tokens(weights.log() + gumbel_from_keys(self.keys[rows], weights.shape[-1]))


def token_scores(logits: Tensor, tokens: Tensor, wanted: AbstractSet[Score]) -> dict[Score, Tensor]:
    """Return scores `f32[R]` of `tokens [R]` under raw `logits [R, V]`."""
    if not wanted:
        return {}
    log_probabilities = logits.float().log_softmax(-1)
    result: dict[Score, Tensor] = {}
    if "confidence" in wanted:
        result["confidence"] = log_probabilities.gather(-1, tokens[:, None]).squeeze(-1).exp()
    if "logprob" in wanted:
        result["logprob"] = log_probabilities.gather(-1, tokens[:, None]).squeeze(-1)
    if "margin" in wanted:
        best = log_probabilities.topk(2, -1).values.exp()
        result["margin"] = best[:, 0] - best[:, 1]
    if "entropy" in wanted:
        # In place, since these are the largest tensors of a read. Clamped logarithms are finite.
        terms = log_probabilities.exp().mul_(log_probabilities.clamp_(min=-1e4))
        result["entropy"] = -terms.sum(-1)
    return result
