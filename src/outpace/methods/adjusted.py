"""Logits that are adjusted before the read: by guidance, and to control the end of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from outpace.decoding import Sample
from outpace.decoding.sampling import GroupReader, Readout, token_scores


@dataclass(frozen=True, kw_only=True)
class AdjustedSample(Sample):
    """Tokens sampled from adjusted logits.

    Attributes:
        null: `[r, vocab]` logits of the same slots after a prompt of masks, for guidance.
        guidance: weight by which logits are moved away from `null`.
        never: tokens that are banned.
        last: tokens that are excluded from the scores; holes that choose them are filled last.
    """

    null: Tensor | None = None
    guidance: float = 0.0
    never: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        """Return a reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        choose = cls.make_chooser(reads, slots, device)
        judge = cls.make_scorer(reads, slots, device)
        wanted = {score for each in reads for score in each.scores if score == "logprob"}
        ends = [0, *accumulate(map(len, slots))]
        spans = list(zip(reads, ends, ends[1:], strict=False))

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            logits = logits.to(torch.float32, copy=True)
            parts = []
            for each, begin, end in spans:
                overlap = slice(max(begin, rows.start), min(end, rows.stop))
                if overlap.start < overlap.stop:
                    part = logits[overlap.start - rows.start : overlap.stop - rows.start]
                    parts.append((each, part))
                    if each.null is not None:
                        null = each.null[overlap.start - begin : overlap.stop - begin]
                        part.sub_(null).mul_(1 + each.guidance).add_(null)
                    ban_tokens(part, each.never)
            tokens = choose(logits, rows)
            raw = token_scores(logits, tokens, wanted)
            for each, part in parts:
                ban_tokens(part, each.last)
            judged = judge(logits, tokens, rows)
            ended = logits.gather(-1, tokens[:, None]).squeeze(-1) == -torch.inf
            for name, score in judged.items():
                score.masked_fill_(ended, torch.inf if name == "entropy" else -torch.inf)
            return Readout(tokens, judged | raw)

        return read_chunk


def ban_tokens(logits: Tensor, tokens: Sequence[int]) -> None:
    """Set tokens of `logits [r, V]` to minus infinity, one by one, without synchronising."""
    for token in tokens:
        logits[:, token] = -torch.inf
