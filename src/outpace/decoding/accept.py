"""Verification of drafts: how many drafted tokens the target accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.decoding.request import Request
from outpace.decoding.sampling import (
    GroupReader,
    NoisyChooser,
    Read,
    Readout,
    Sample,
    argmax_tokens,
    row_chooser,
    slot_noise_keys,
    uniform_from_keys,
)
from outpace.kernels.fused import DraftRows, runs_triton, to_device, verify_rows

Verify = Literal["match", "rejection"]
"""Accept a draft if it equals the target's own sample, or by rejection sampling."""

DRAFT_STEP, COIN_STEP = 1, 2
"""Noise steps of rejection sampling; the target's own is 0."""


def agreement(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the leading run in which two token lists agree."""
    for index, (draft, token) in enumerate(zip(drafted, tokens, strict=False)):
        if draft != token:
            return index
    return min(len(drafted), len(tokens))


def draft_read(request: Request, verify: Verify, match: Sample) -> Sample:
    """Return how a draft chooses tokens: by `match`, or with kept logits for rejection."""
    return request.sample(DRAFT_STEP, keep=True) if verify == "rejection" else match


def verify_read(
    request: Request, verify: Verify, drafted: Sequence[int], guesses: Sequence[Tensor | None]
) -> Read:
    """Return how the target reads drafted tokens and the token after them.

    The leading drafts that equal the tokens read are accepted, and the next token read is added.

    Args:
        request: the request.
        verify: rule of acceptance.
        drafted: drafted tokens.
        guesses: logits that the drafts were drawn from, where they were kept.
    """
    plain = request.sample()
    if verify == "match" or not drafted:
        return plain
    guess = torch.cat([guess for guess in guesses if guess is not None])
    return Rejection(
        drafted=tuple(drafted), guess=guess, sampling=plain.sampling, scores=plain.scores
    )


@dataclass(frozen=True, kw_only=True)
class Rejection(Sample):
    """Speculative sampling (Leviathan et al., 2023, algorithm 1; Chen et al., 2023).

    A draft x is accepted with probability min(1, p(x) / q(x)), where p and q are the distributions
    of the target and of the draft under the request's sampling options. Otherwise the token is
    drawn from max(0, p - q). `guess [k, V]` are the raw logits of the k `drafted` tokens. One more
    slot is read, from p.
    """

    drafted: tuple[int, ...]
    guess: Tensor

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        choose = row_chooser([r.sampling for r in reads], [0] * len(reads), slots, device)
        if not isinstance(choose, NoisyChooser):
            return super().make_reader(reads, slots, device)
        drafts = stack_drafts(reads, slots, device)
        if runs_triton(device) and all(read.has_raw_scores for read in reads):
            return cls.make_fused_verifier(reads, choose, drafts)
        judge = cls.make_scorer(reads, slots, device)
        drafted, coins = drafts.tokens, uniform_from_keys(drafts.coins, 1)
        guess = torch.cat([F.pad(read.guess, (0, 0, 0, 1)) for read in reads])

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            vocab = max(logits.shape[-1], guess.shape[-1])
            own_drafts = drafted[rows, None]
            has_draft = own_drafts >= 0
            p = F.pad(choose.choice_probabilities(logits, rows), (0, vocab - logits.shape[-1]))
            q = (
                F.pad(choose.choice_probabilities(guess[rows], rows), (0, vocab - guess.shape[-1]))
                * has_draft
            )
            columns = own_drafts.clamp(min=0)
            accepted = has_draft & (coins[rows] * q.gather(-1, columns) < p.gather(-1, columns))
            rest = (p - q).clamp(min=0)
            # Rounding may leave nothing where both distributions are the same.
            total = rest.sum(-1, keepdim=True)
            other = choose.draw_tokens(torch.where(total > 0, rest, p), rows)
            tokens = torch.where(accepted.squeeze(-1), drafted[rows], other)
            # Where a logit is NaN, so is a distribution; arg-max takes NaN as the largest.
            tokens = torch.where(total.squeeze(-1).isnan(), argmax_tokens(logits), tokens)
            return Readout(tokens, judge(logits, tokens, rows))

        return read_chunk

    @classmethod
    def make_fused_verifier(
        cls, reads: Sequence[Self], noisy: NoisyChooser, drafts: DraftRows
    ) -> GroupReader:
        wanted = {score for read in reads for score in read.scores}
        guess = torch.cat([read.guess for read in reads]) if len(reads) > 1 else reads[0].guess

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            own_drafts, settings = (
                DraftRows(*(each[rows] for each in drafts)),
                noisy.truncation.settings_of(rows),
            )
            tokens, scores = verify_rows(logits, guess, own_drafts, settings, noisy.keys[rows])
            return Readout(tokens, {score: scores[score] for score in wanted})

        return read_chunk


def stack_drafts(
    reads: Sequence[Rejection], slots: Sequence[Sequence[int]], device: torch.device
) -> DraftRows:
    """Return the drafts of all rows of `reads`; the last row of each has none."""
    tokens = [token for read in reads for token in (*read.drafted, -1)]
    indices = np.cumsum([token >= 0 for token in tokens]) - 1
    keys = slot_noise_keys([read.sampling for read in reads], [COIN_STEP] * len(reads), slots)
    table = np.stack((np.array(tokens, dtype=np.int64), indices, keys.numpy()))
    return DraftRows(*to_device(table, device))
