"""How many drafted tokens are kept, such that the output follows the target alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.decoding.fly import Fly
from outpace.decoding.likeliest import likeliest
from outpace.decoding.noise import uniform
from outpace.decoding.request import Request
from outpace.decoding.sampling import Noisy, Read, Reader, Readout, Sample, chooser, noise_of
from outpace.kernels.fused import Drafts, runs_triton, to_device, verify_rows

Verify = Literal["match", "rejection", "fly"]
"""Keep a draft where the target, sampled with its own noise, says it; by rejection; or loosely."""

DRAFT, COIN = 1, 2
"""Steps whose noise rejection sampling uses, besides that of the target, which is 0."""


def agreement(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the leading run in which two token lists agree."""
    for index, (draft, token) in enumerate(zip(drafted, tokens, strict=False)):
        if draft != token:
            return index
    return min(len(drafted), len(tokens))


def draft_read(request: Request, verify: Verify, match: Sample) -> Sample:
    """How a draft chooses tokens: by `match`, or as rejection sampling must know it."""
    return request.sample(DRAFT, keep=True) if verify == "rejection" else match


def verify_read(
    request: Request,
    verify: Verify,
    drafted: Sequence[int],
    guesses: Sequence[Tensor | None],
    *,
    fly: tuple[int, float],
) -> Read:
    """How the target reads drafted tokens, and the one behind them.

    The drafts that agree with its tokens are kept, and its next token behind them. `guesses` are
    the logits that the drafts were drawn from, as far as these were kept; `fly` is the window and
    the entropy of loose verification.
    """
    plain = request.sample()
    if verify == "match" or not drafted:
        return plain
    if verify == "fly":
        window, entropy = fly
        return Fly(
            drafted=tuple(drafted),
            window=window,
            entropy=entropy,
            sampling=plain.sampling,
            scores=plain.scores,
        )
    guess = torch.cat([guess for guess in guesses if guess is not None])
    return Rejection(
        drafted=tuple(drafted), guess=guess, sampling=plain.sampling, scores=plain.scores
    )


@dataclass(frozen=True, kw_only=True)
class Rejection(Sample):
    """Speculative sampling (Leviathan et al., 2023, algorithm 1; Chen et al., 2023).

    A draft x is kept with probability min(1, p(x) / q(x)), where p is the target's law and q that
    of the draft, both under the request's sampling; otherwise the token comes from max(0, p - q).
    `guess [k, V]` are the raw logits of the k `drafted` tokens. One more slot is read, from p.
    """

    drafted: tuple[int, ...]
    guess: Tensor

    @classmethod
    def group(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        choose = chooser([r.sampling for r in reads], [0] * len(reads), slots, device)
        if not isinstance(choose, Noisy):
            return super().group(reads, slots, device)
        drafts = drafts_of(reads, slots, device)
        if runs_triton(device) and all(read.raw for read in reads):
            return cls.verified(reads, choose, drafts)
        judge = cls.judge(reads, slots, device)
        drafted, coins = drafts.tokens, uniform(drafts.coins, 1)
        guess = torch.cat([F.pad(read.guess, (0, 0, 0, 1)) for read in reads])

        def read(logits: Tensor, rows: slice) -> Readout:
            vocab = max(logits.shape[-1], guess.shape[-1])
            mine = drafted[rows, None]
            known = mine >= 0
            p = F.pad(choose.law(logits, rows), (0, vocab - logits.shape[-1]))
            q = F.pad(choose.law(guess[rows], rows), (0, vocab - guess.shape[-1])) * known
            at = mine.clamp(min=0)
            kept = known & (coins[rows] * q.gather(-1, at) < p.gather(-1, at))
            rest = (p - q).clamp(min=0)
            # Rounding may leave nothing where both laws are the same.
            left = rest.sum(-1, keepdim=True)
            other = choose.draw(torch.where(left > 0, rest, p), rows)
            tokens = torch.where(kept.squeeze(-1), drafted[rows], other)
            # Where a logit is no number, neither is a law; that logit is the largest.
            tokens = torch.where(left.squeeze(-1).isnan(), likeliest(logits), tokens)
            return Readout(tokens, judge(logits, tokens, rows))

        return read

    @classmethod
    def verified(cls, reads: Sequence[Self], noisy: Noisy, drafts: Drafts) -> Reader:
        """The same reader in one launch, on logits of any dtype."""
        wanted = {score for read in reads for score in read.scores}
        guess = torch.cat([read.guess for read in reads]) if len(reads) > 1 else reads[0].guess

        def read(logits: Tensor, rows: slice) -> Readout:
            mine, settings = Drafts(*(each[rows] for each in drafts)), noisy.cut.of_rows(rows)
            tokens, scores = verify_rows(logits, guess, mine, settings, noisy.keys[rows])
            return Readout(tokens, {score: scores[score] for score in wanted})

        return read


def drafts_of(
    reads: Sequence[Rejection], slots: Sequence[Sequence[int]], device: torch.device
) -> Drafts:
    """The drafts of all rows of `reads`; the last row of each has none."""
    tokens = [token for read in reads for token in (*read.drafted, -1)]
    places = np.cumsum([token >= 0 for token in tokens]) - 1
    keys = noise_of([read.sampling for read in reads], [COIN] * len(reads), slots)
    table = np.stack((np.array(tokens, dtype=np.int64), places, keys.numpy()))
    return Drafts(*to_device(table, device))
