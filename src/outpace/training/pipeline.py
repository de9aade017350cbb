"""The blocks of many responses, as pipelined decoding appends and fills them."""

from dataclasses import replace

import torch
from torch import Tensor

from outpace.attention.ranges import documents
from outpace.training.rows import UNSCORED, Rows

ADD, ACTIVATE = 0.1, 0.95
"""Shares of a block that are filled when the next one is appended, and when it is forced."""


class Pipeline:
    """Responses that are nothing but holes at first; what is filled is the true token.

    Attributes:
        places: Rows that score the holes, `i64[holes]`.
        number: Block of each of them.
        sizes: Holes of each block, `i64[blocks]`.
        leads: Which blocks are the first of their response, `bool[blocks]`.
        left: Which holes are still there, `bool[holes]`.
        appended: Which blocks are there, `bool[blocks]`.
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
        """Fill the holes that decoding fills at these scores of the state's, `f32[scored]`.

        Those above `confidence`; in a block without any the best one, if the block before it is
        all but filled.
        """
        number = self.number[self.open]
        forced = self.leads | (self.filled() >= ACTIVATE).roll(1)
        best = scores.new_zeros(len(self.sizes)).scatter_reduce(0, number, scores, "amax")[number]
        alone = (scores == best) & (best <= confidence) & forced[number]
        self.left[self.open[(scores > confidence) | alone]] = False

    def filled(self) -> Tensor:
        """Share of each block that is filled, `f32[blocks]`."""
        return 1 - torch.bincount(self.number[self.left], minlength=len(self.sizes)) / self.sizes
