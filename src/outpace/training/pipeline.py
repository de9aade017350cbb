"""The blocks of many responses, as pipelined decoding appends and fills them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outpace.attention.ranges import documents
from outpace.decoding.blocks import ACTIVATE, ADD, taken
from outpace.training.rows import UNSCORED, Rows


class Pipeline:
    """Responses that are nothing but holes at first; what is filled is the true token.

    Attributes:
        places: `i64[holes]`, rows that score the holes.
        number: `i64[holes]`, block of each of them.
        sizes: `i64[blocks]`, holes of each block.
        leads: `bool[blocks]`, which blocks are the first of their response.
        left: `bool[holes]`, which holes are still there.
        appended: `bool[blocks]`, which blocks are there.
        open: `i64[scored]`, the holes that the last state scores.
    """

    def __init__(self, rows: Rows, shift: int) -> None:
        """Find the blocks of rows in which every response token is a hole and scored."""
        self.rows, self.shift = rows, shift
        self.places = torch.nonzero(rows.labels != UNSCORED).squeeze(1)
        slots = self.places.cpu() + shift
        _, number, sizes = torch.unique_consecutive(
            rows.ranges[slots, 0, 1], return_inverse=True, return_counts=True
        )
        ends = torch.tensor([end for _, end in documents(rows.ranges)])
        document = torch.bucketize(slots, ends, right=True)
        owner = document[sizes.cumsum(0) - 1]
        leads = torch.ones(len(sizes), dtype=torch.bool)
        leads[1:] = owner[1:] != owner[:-1]
        device = self.places.device
        self.number, self.sizes, self.leads = (t.to(device) for t in (number, sizes, leads))
        self.left = torch.ones_like(self.places, dtype=torch.bool)
        self.appended = torch.zeros_like(self.leads)

    def append(self) -> Rows:
        """Append a block to each response whose last one is filled enough; the state then.

        Its holes in appended blocks are scored, with the inverse of their block's share as weight.
        """
        filled = self.filled()
        self.appended |= self.leads | (self.appended & (filled >= ADD)).roll(1)
        self.open = torch.nonzero(self.left & self.appended[self.number]).squeeze(1)
        ids, labels = self.rows.ids.clone(), torch.full_like(self.rows.labels, UNSCORED)
        done, places = self.places[~self.left], self.places[self.open]
        ids[done + self.shift] = self.rows.labels[done]
        labels[places] = self.rows.labels[places]
        weights = self.rows.weights.clone()
        weights[places] /= (1 - filled)[self.number[self.open]]
        return replace(self.rows, ids=ids, labels=labels, weights=weights)

    def fill(self, scores: Tensor, confidence: float) -> None:
        """Fill the holes that decoding fills at these scores of the state's, `f32[scored]`."""
        forced = (self.leads | (self.filled() >= ACTIVATE).roll(1)).tolist()
        counts = self.number[self.open].bincount(minlength=len(self.sizes)).tolist()
        for holes, sure, must in zip(
            self.open.split(counts), scores.cpu().split(counts), forced, strict=True
        ):
            chosen = taken(sure.numpy(), sure.numpy(), confidence, forced=must)
            self.left[holes[torch.from_numpy(chosen)]] = False

    def filled(self) -> Tensor:
        """Share of each block that is filled, `f32[blocks]`."""
        return 1 - torch.bincount(self.number[self.left], minlength=len(self.sizes)) / self.sizes
