"""How logits become tokens and scores: for the rows of many sequences at once.

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

from outpace.decoding.cut import Cut, narrowed, nucleus
from outpace.decoding.joint import Joint, Jointly
from outpace.decoding.likeliest import likeliest
from outpace.decoding.noise import gumbel, noise_keys
from outpace.decoding.sampling_params import PLAIN, Sampling
from outpace.kernels.fused import Settings, read_rows, runs_triton, to_device

Score = Literal["confidence", "entropy", "logprob", "margin"]


@dataclass(slots=True)
class Readout:
    """What a read makes of `R` rows; everything `[R]` on the device."""

    tokens: Tensor
    scores: dict[Score, Tensor]


Judge = Callable[[Tensor, Tensor, slice], dict[Score, Tensor]]
"""Scores the tokens `[r]` of logits `[r, V]`, which are a slice of a group's rows."""

Reader = Callable[[Tensor, slice], Readout]
"""Turns logits `[r, V]` of a slice of a group's rows into a readout."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """How the logits of a forward become tokens. Reads of one type are run together.

    `scores` names what else is wanted, since each score is another pass over the vocabulary.
    `keep` leaves the raw logits on the device as `Prediction.logits`.
    """

    keep: bool = False
    scores: tuple[Score, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all of its rows must be read at once."""
        return False

    @classmethod
    def group(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Sample(Read):
    """Greedy or sampled tokens. Noise is a function of (seed, slot, step), never of the batch.

    Scores are those of the raw logits, or where `drawn` of the distribution that the tokens are
    drawn from: divided by the temperature (unless it is 0), cut to top-p and top-k. A `logprob` is
    always that of the raw logits. With `joint`, the tokens of all slots fit together.
    """

    sampling: Sampling = PLAIN
    step: int = 0
    drawn: bool = False
    joint: Joint | None = None

    @property
    def whole(self) -> bool:
        """Tokens that fit together are chosen together."""
        return self.joint is not None

    @classmethod
    def group(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        for read in reads:
            if read.sampling.temperature != 0 or read.scores or read.joint is not None:
                break
        else:
            return read_greedily
        if runs_triton(device) and cls.at_once(reads):
            return cls.fused(reads, slots, device)
        choose = cls.choice(reads, slots, device)
        judge = cls.judge(reads, slots, device)

        def choose_and_judge(logits: Tensor, rows: slice) -> Readout:
            tokens = choose(logits, rows)
            return Readout(tokens, judge(logits, tokens, rows))

        return choose_and_judge

    @classmethod
    def at_once(cls, reads: Sequence[Self]) -> bool:
        """Whether one launch gives tokens and scores, of rows by themselves."""
        return any(read.scores for read in reads) and not any(read.whole for read in reads)

    @property
    def raw(self) -> bool:
        """Whether all scores are those of the raw logits."""
        return self.sampling.plain or not (self.drawn and self.scores)

    @classmethod
    def fused(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Reader:
        """The same reader in one launch, whatever the dtype of the logits."""
        wanted = {score for read in reads for score in read.scores}
        noisy = Noisy.of([r.sampling for r in reads], [r.step for r in reads], slots, device)
        law = np.repeat([not read.raw for read in reads], [len(each) for each in slots])
        drawn = to_device(law, device) if law.any() else None

        def read(logits: Tensor, rows: slice) -> Readout:
            mine = None if drawn is None else drawn[rows]
            tokens, scores = noisy.at_once(logits, rows, drawn=mine)
            return Readout(tokens, {score: scores[score] for score in wanted})

        return read

    @classmethod
    def choice(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Chooser:
        """How `reads` choose the tokens of their rows."""
        apart = chooser([r.sampling for r in reads], [r.step for r in reads], slots, device)
        return Jointly(apart, reads, slots) if any(r.whole for r in reads) else apart

    @classmethod
    def judge(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Judge:
        """The scores that `reads` want of the tokens of their rows."""
        wanted = {score for read in reads for score in read.scores}
        if not wanted:
            return lambda logits, tokens, rows: {}
        judged = [read.sampling if read.drawn else PLAIN for read in reads]
        if all(each.plain for each in judged):
            return lambda logits, tokens, rows: scores(logits, tokens, wanted)
        cut = Cut.of(judged, slots, device)
        raw = wanted & {"logprob"}

        def judge(logits: Tensor, tokens: Tensor, rows: slice) -> dict[Score, Tensor]:
            as_drawn = scores(cut(logits, rows), tokens, wanted - raw)
            return as_drawn | scores(logits, tokens, raw)

        return judge


GREEDY = Sample()


def read_greedily(logits: Tensor, rows: slice) -> Readout:
    """The most probable token of each row, and no score."""
    return Readout(likeliest(logits), {})


Chooser = Callable[[Tensor, slice], Tensor]
"""Chooses a token `[r]` from each row of logits `[r, V]`, which are a slice of a group's rows."""


def chooser(
    samplings: Sequence[Sampling],
    steps: Sequence[int],
    slots: Sequence[Sequence[int]],
    device: torch.device,
) -> Chooser:
    """Spread each request's settings, and the noise of its step, over the slots that it wants."""
    if all(sampling.temperature == 0 for sampling in samplings):
        return lambda logits, rows: likeliest(logits)
    return Noisy.of(samplings, steps, slots, device)


def noise_of(
    samplings: Sequence[Sampling], steps: Sequence[int], slots: Sequence[Sequence[int]]
) -> Tensor:
    """Keys `i64[R]` of the noise at all slots that the requests want."""
    counts = [len(wanted) for wanted in slots]
    seeds = np.array([int(sampling.seed) % 2**64 for sampling in samplings], dtype=np.uint64)
    places = np.fromiter((slot for wanted in slots for slot in wanted), np.uint64, sum(counts))
    turns = np.array([step % 2**64 for step in steps], dtype=np.uint64)
    keys = noise_keys(np.repeat(seeds, counts), np.repeat(turns, counts), places)
    return torch.from_numpy(keys.astype(np.int64))


@dataclass(slots=True, kw_only=True)
class Noisy:
    """A chooser of rows with settings and noise of their own."""

    cut: Cut
    keys: Tensor

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        steps: Sequence[int],
        slots: Sequence[Sequence[int]],
        device: torch.device,
    ) -> Self:
        """Spread each request's settings, and the noise of its step, over its slots."""
        keys = noise_of(samplings, steps, slots).numpy()
        return cls(cut=Cut.of(samplings, slots, device), keys=to_device(keys, device))

    def at_once(
        self,
        logits: Tensor,
        rows: slice,
        guess: Tensor | None = None,
        ratio: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Tokens of the rows `rows` and all scores, by the kernel, see `read_rows`."""
        return read_rows(logits, self.cut.of_rows(rows), self.keys[rows], guess, ratio, drawn)

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Token of each row of `logits [r, V]`, which are the rows `rows` of the group."""
        if runs_triton(logits.device):
            return self.at_once(logits, rows)[0]
        settings, known = self.cut.of_rows(rows), self.cut.known[:, rows]
        tokens = likeliest(logits)
        # Rows are picked by index, so that a greedy neighbour costs nothing and changes nothing.
        if len(found := known[0].nonzero()[0]):
            warm = to_device(found, logits.device)
            own = Settings(*(setting[warm] for setting in settings))
            scaled = logits[warm].float() / own.temperature[:, None]
            noised = narrowed(scaled, own, known[:, found])
            noised = noised + gumbel(self.keys[rows][warm], scaled.shape[-1])
            tokens[warm] = nucleus(scaled, noised, own.top_p)
        return tokens

    def law(self, logits: Tensor, rows: slice) -> Tensor:
        """Probabilities `f32[r, V]` with which the tokens of `logits [r, V]` are chosen."""
        law = torch.zeros_like(logits, dtype=torch.float32)
        law.scatter_(-1, likeliest(logits)[:, None], 1.0)
        if len(found := self.cut.known[0, rows].nonzero()[0]):
            warm = to_device(found, logits.device)
            law[warm] = self.cut(logits, rows)[warm].softmax(-1)
        return law

    def draw(self, weights: Tensor, rows: slice) -> Tensor:
        """Token `[r]` of each row of `weights [r, V]`, which need not add up to one."""
        return likeliest(weights.log() + gumbel(self.keys[rows], weights.shape[-1]))


def scores(logits: Tensor, tokens: Tensor, wanted: AbstractSet[Score]) -> dict[Score, Tensor]:
    """Scores `f32[R]` of `tokens [R]` under raw `logits [R, V]`."""
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
        # In place, since these are the largest tensors of a read. A clamped logarithm is finite.
        terms = log_probabilities.exp().mul_(log_probabilities.clamp_(min=-1e4))
        result["entropy"] = -terms.sum(-1)
    return result
