"""How logits become tokens and scores: for the rows of many sequences at once.

Shapes: R rows of one read group, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.decoding.cut import keep_min_p, keep_top_k, keep_top_p, nucleus
from outpace.decoding.joint import Joint, Jointly
from outpace.decoding.noise import gumbel, noise_keys

Score = Literal["confidence", "entropy", "logprob", "margin"]


MOST, COLDEST, HOTTEST = 2**31, 1e-30, 1e30
"""What counts stay below, and temperatures between, so that tensors of a batch can hold them."""


def is_number(value: object) -> bool:
    """Whether this is a finite number, and not a truth value."""
    try:
        return (
            isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
        )
    except OverflowError:
        return False


def is_whole(value: object) -> bool:
    """Whether this is a whole number, and not a truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A request's choice of randomness; temperature 0 is greedy.

    `top_p` keeps every token unless those that are more probable already hold more than this
    mass; `top_k` keeps the k most probable; `min_p` keeps what has at least this share of the
    probability of the most probable. A token must pass all, each on the whole distribution. Raises
    `ValueError` for values that mean nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or (
            self.temperature and not COLDEST <= self.temperature < HOTTEST
        ):
            raise ValueError(
                f"temperature must be 0 or lie between {COLDEST:g} and {HOTTEST:g}, "
                f"not {self.temperature!r}"
            )
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie above 0 and be at most 1, not {self.top_p!r}")
        if self.top_k is not None and not (is_whole(self.top_k) and 1 <= self.top_k < MOST):
            raise ValueError(
                f"top_k must be a whole number from 1 to {MOST - 1} (or None for all), "
                f"not {self.top_k!r}"
            )
        if not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must lie between 0 and 1, not {self.min_p!r}")
        if not is_whole(self.seed):
            raise ValueError(f"seed must be a whole number, not {self.seed!r}")

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the model's distribution, neither tempered nor cut."""
        return self.temperature in (0, 1) and not self.cuts

    @property
    def cuts(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


PLAIN = Sampling()


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
        choose = cls.choice(reads, slots, device)
        judge = cls.judge(reads, slots, device)

        def read(logits: Tensor, rows: slice) -> Readout:
            tokens = choose(logits, rows)
            return Readout(tokens, judge(logits, tokens, rows))

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
        return lambda logits, rows: logits.argmax(-1)
    return Noisy(
        cut=Cut.of(samplings, slots, device),
        keys=noise_of(samplings, steps, slots).to(device),
    )


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
class Cut:
    """The settings of a group's rows, each a tensor `[R]`."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    @classmethod
    def of(
        cls, samplings: Sequence[Sampling], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Self:
        """Spread each request's settings over the slots that it wants."""
        counts = [len(wanted) for wanted in slots]

        def spread(values: list[float], kind: type) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=kind), counts)).to(device)

        return cls(
            temperature=spread([s.temperature for s in samplings], np.float32),
            top_p=spread([s.top_p for s in samplings], np.float32),
            top_k=spread([s.top_k or MOST for s in samplings], np.int64),
            min_p=spread([s.min_p for s in samplings], np.float32),
        )

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Logits `[r, V]` of the rows `rows` of the group, as their tokens are drawn."""
        temperature, top_p, top_k = (t[rows] for t in (self.temperature, self.top_p, self.top_k))
        if bool((temperature > 0).any()):
            logits = logits.float() / torch.where(temperature > 0, temperature, 1)[:, None]
        if bool((top_p < 1).any()):
            logits = keep_top_p(logits, top_p)
        return keep_top_k(keep_min_p(logits, self.min_p[rows]), top_k)


@dataclass(slots=True, kw_only=True)
class Noisy:
    """A chooser of rows with settings and noise of their own."""

    cut: Cut
    keys: Tensor

    def __call__(self, logits: Tensor, rows: slice) -> Tensor:
        """Token of each row of `logits [r, V]`, which are the rows `rows` of the group."""
        tokens = logits.argmax(-1)
        # Rows are picked by index, so that a greedy neighbour costs nothing and changes nothing.
        temperature = self.cut.temperature[rows]
        warm = (temperature > 0).nonzero().squeeze(-1)
        if len(warm):
            scaled = logits[warm].float() / temperature[warm, None]
            noised = keep_top_k(scaled, self.cut.top_k[rows][warm])
            noised = keep_min_p(noised, self.cut.min_p[rows][warm])
            noised = noised + gumbel(self.keys[rows][warm], scaled.shape[-1])
            tokens[warm] = nucleus(scaled, noised, self.cut.top_p[rows][warm])
        return tokens

    def law(self, logits: Tensor, rows: slice) -> Tensor:
        """Probabilities `f32[r, V]` with which the tokens of `logits [r, V]` are chosen."""
        law = F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        warm = (self.cut.temperature[rows] > 0).nonzero().squeeze(-1)
        if len(warm):
            law[warm] = self.cut(logits, rows)[warm].softmax(-1)
        return law

    def draw(self, weights: Tensor, rows: slice) -> Tensor:
        """Token `[r]` of each row of `weights [r, V]`, which need not add up to one."""
        return (weights.log() + gumbel(self.keys[rows], weights.shape[-1])).argmax(-1)


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
