"""A tree of drafts while it grows (EAGLE-2, Li et al., 2024, section 4), and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from outpace.decoding.processor import NEVER


@dataclass(slots=True)
class Branches:
    """Drafted nodes, level by level in the order in which they were found.

    Attributes:
        width: nodes that are extended per level, and tokens by which each of them is.
        tokens: of each node.
        parents: the node that each hangs on; -1 is the last token of the text.
        scores: `f32`, log-probability of each node and those above it.
        depth: number of levels.
        beam: the nodes that the next level extends.
        above: of the nodes that were extended, the slots behind the text of their ancestors and
            themselves, as bits.
        guesses: logits of each level of a chain, which its token was drawn from.
    """

    width: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    depth: int = 0
    beam: list[int] = field(default_factory=lambda: [-1])
    above: dict[int, int] = field(default_factory=lambda: {-1: 0})
    guesses: list[Tensor | None] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], logits: Tensor | None) -> list[int]:
        """Hang the next level on the beam by its rows of logits; the rows that go on from here.

        A chain takes the `tokens` that were read, and needs no logits.
        """
        first, found = len(self.tokens), np.zeros((1, 1), dtype=np.float32)
        self.depth += 1
        if self.width == 1:
            children = np.array([tokens])
            self.guesses.append(logits)
        else:
            assert logits is not None
            best = logits.log_softmax(-1).topk(min(self.width, logits.shape[-1]))
            found, children = best.values.cpu().numpy(), best.indices.cpu().numpy()
        if first:
            found = found + self.scores[self.beam][:, None]
        self.tokens += children.ravel().tolist()
        self.parents += np.repeat(self.beam, children.shape[1]).tolist()
        self.scores = np.append(self.scores, found.ravel())
        ahead = likeliest(found.ravel(), self.width)
        self.beam = (first + ahead).tolist()
        rows: list[int] = (ahead // children.shape[1]).tolist()
        return rows

    def bits(self) -> tuple[int, ...]:
        """Slots behind the text that the beam's nodes see, as bits; they get the next ones."""
        begin = len(self.above) - 1
        own = tuple(self.above[self.parents[node]] for node in self.beam)
        for place, (node, seen) in enumerate(zip(self.beam, own, strict=True), begin):
            self.above[node] = seen | 1 << place
        return own

    def path(self, node: int) -> list[int]:
        """Tokens from the text to a node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def best(self, count: int) -> list[int]:
        """The likeliest nodes, each behind the one that it hangs on."""
        # Where a token is certain, a node is as likely as its parent, which was found before it.
        return sorted(likeliest(self.scores, count).tolist())

    def parents_among(self, nodes: Sequence[int]) -> list[int]:
        """The row that each hangs on, of rows for the last token and then these nodes."""
        rows = {node: row for row, node in enumerate((-1, *nodes))}
        return [-1, *(rows[self.parents[node]] for node in nodes)]


def likeliest(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the highest scores, the highest first, without those of banned tokens."""
    places = np.argsort(-scores, kind="stable")[:count]
    return places[scores[places] > NEVER / 2]


def followed(parents: Sequence[int], tokens: Sequence[int], said: Sequence[int]) -> list[int]:
    """Rows of a tree from its root on, as far as each is what the target `said` in the one above.

    `tokens` are those of all rows but the root.
    """
    hung = zip(parents[1:], tokens, strict=True)
    children = {(parent, token): row for row, (parent, token) in enumerate(hung, 1)}
    path, row = [0], children.get((0, said[0]))
    while row is not None:
        path.append(row)
        row = children.get((row, said[row]))
    return path
