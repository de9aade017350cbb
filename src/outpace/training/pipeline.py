"""Simulation of pipelined decoding: blocks of many responses are appended and filled."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outpace.attention.ranges import find_documents
from outpace.decoding.blocks import D2F_ACTIVATE, D2F_ADD, select_block_holes
from outpace.training.rows import UNSCORED, Rows


class Pipeline:
    """Initially fully masked responses, filled with their true tokens as decoding would.

    Attributes:
        places: `i64[holes]`, rows that predict the holes.
        block_numbers: `i64[holes]`, block of each hole.
        sizes: `i64[blocks]`, number of holes of each block.
        is_first: `bool[blocks]`, whether a block is the first of its response.
        unfilled: `bool[holes]`, whether a hole is still masked.
        appended: `bool[blocks]`, whether a block has been appended.
        open_holes: `i64[scored]`, the holes scored in the last state.
    """

    def __init__(self, rows: Rows, shift: int) -> None:
        """Find the blocks of rows whose response tokens are all masked and scored."""
        self.rows, self.shift = rows, shift
        self.places = torch.nonzero(rows.labels != UNSCORED).squeeze(1)
        slots = self.places.cpu() + shift
        _, number, sizes = torch.unique_consecutive(
            rows.ranges[slots, 0, 1], return_inverse=True, return_counts=True
        )
        ends = torch.tensor([end for _, end in find_documents(rows.ranges)])
        document = torch.bucketize(slots, ends, right=True)
        owner = document[sizes.cumsum(0) - 1]
        leads = torch.ones(len(sizes), dtype=torch.bool)
        leads[1:] = owner[1:] != owner[:-1]
        device = self.places.device
        self.block_numbers, self.sizes, self.is_first = (
            t.to(device) for t in (number, sizes, leads)
        )
        self.unfilled = torch.ones_like(self.places, dtype=torch.bool)
        self.appended = torch.zeros_like(self.is_first)

    def append_blocks(self) -> Rows:
        """Append a block to each response whose last block is filled enough; return the state.

        Holes of appended blocks are scored, weighted by the inverse of their block's masked
        fraction.
        """
        filled = self.filled_fraction()
        self.appended |= self.is_first | (self.appended & (filled >= D2F_ADD)).roll(1)
        self.open_holes = torch.nonzero(self.unfilled & self.appended[self.block_numbers]).squeeze(
            1
        )
        ids, labels = self.rows.ids.clone(), torch.full_like(self.rows.labels, UNSCORED)
        done, places = self.places[~self.unfilled], self.places[self.open_holes]
        ids[done + self.shift] = self.rows.labels[done]
        labels[places] = self.rows.labels[places]
        weights = self.rows.weights.clone()
        weights[places] /= (1 - filled)[self.block_numbers[self.open_holes]]
        return replace(self.rows, ids=ids, labels=labels, weights=weights)

    def fill_holes(self, scores: Tensor, confidence: float) -> None:
        """Fill the holes that decoding would fill, given their scores `f32[scored]`."""
        forced = (self.is_first | (self.filled_fraction() >= D2F_ACTIVATE).roll(1)).tolist()
        counts = self.block_numbers[self.open_holes].bincount(minlength=len(self.sizes)).tolist()
        for holes, sure, must in zip(
            self.open_holes.split(counts), scores.cpu().split(counts), forced, strict=True
        ):
            chosen = select_block_holes(sure.numpy(), sure.numpy(), confidence, is_active=must)
            self.unfilled[holes[torch.from_numpy(chosen)]] = False

    def filled_fraction(self) -> Tensor:
        """Return the filled fraction of each block, `f32[blocks]`."""
        return (
            1
            - torch.bincount(self.block_numbers[self.unfilled], minlength=len(self.sizes))
            / self.sizes
        )
