"""Draft trees: their attention pattern, and the choice of branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from outpace.decoding.processor import BANNED_LOGIT

MAX_TREE_SLOTS = 63
"""Largest number of tree slots in an ancestor mask, which must fit into a signed 64-bit integer."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of a draft tree, each with an ancestor mask.

    Rows of slots below `root_slot` are causal. The others see all slots below it, themselves, and
    slot `root_slot + j` where bit j of their entry in `ancestor_masks` is set. In a draft tree that
    slot comes before their own, in the same forward or an earlier one. Masks that see each other,
    as in a block, also point at later slots of the same forward.
    """

    root_slot: int
    ancestor_masks: tuple[int, ...]

    @classmethod
    def from_parents(cls, root_slot: int, parents: Sequence[int]) -> Tree:
        """Build a tree whose row i has the parent row `parents[i]`, or the prefix if negative."""
        masks: list[int] = []
        for parent in parents:
            masks.append(0 if parent < 0 else masks[parent] | 1 << parent)
        return cls(root_slot, tuple(masks))

    def causal_rows(self, start: int) -> int:
        """Return the number of rows from slot `start` on that are below the root, so causal."""
        return max(self.root_slot - start, 0)

    def visible_ends(self, start: int) -> list[int]:
        """Return the end of each row's contiguous view, without its ancestors and itself."""
        return [
            *range(start + 1, start + self.causal_rows(start) + 1),
            *[self.root_slot] * len(self.ancestor_masks),
        ]

    def positions(self, start: int) -> list[int]:
        """Return rotary positions of a draft tree: the number of slots that each row sees."""
        prefix = range(start, start + self.causal_rows(start))
        return [*prefix, *(self.root_slot + mask.bit_count() for mask in self.ancestor_masks)]

    def check_rows(self, start: int, rows: int) -> None:
        """Raise `ValueError` where the tree does not match `rows` rows from slot `start` on."""
        causal = self.causal_rows(start)
        if (
            self.root_slot < 0
            or not self.ancestor_masks
            or causal + len(self.ancestor_masks) != rows
        ):
            raise ValueError(
                f"a tree of {len(self.ancestor_masks)} rows with root slot {self.root_slot} "
                f"does not match {rows} rows from slot {start} on"
            )
        slots = min(MAX_TREE_SLOTS, start + rows - self.root_slot)
        for slot, mask in enumerate(self.ancestor_masks, max(start, self.root_slot)):
            if mask < 0 or mask.bit_length() > slots:
                raise ValueError(
                    f"the row of slot {slot} must point at the {slots} slots from root slot "
                    f"{self.root_slot} on"
                )


@dataclass(slots=True)
class DraftTree:
    """Drafted nodes, level by level in the order in which they were found."""

    width: int
    """Nodes that are extended per level, and children of each of them."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Parent of each node; -1 is the last token of the text."""
    scores: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """`f32`, summed log-probability from the root to each node."""
    depth: int = 0
    beam: list[int] = field(default_factory=lambda: [-1])
    """Nodes that the next level extends."""
    node_masks: dict[int, int] = field(default_factory=lambda: {-1: 0})
    """For extended nodes, bits of the draft slots of their ancestors and themselves."""
    draft_logits: list[Tensor | None] = field(default_factory=list)
    """Logits of each level of a chain, which its token was drawn from."""

    def add_level(self, tokens: Sequence[int], logits: Tensor | None) -> list[int]:
        """Add a level below the beam; return the rows of the new beam's parents.

        Args:
            tokens: token of each beam node, used by a chain only.
            logits: `[beam, vocab]` rows of the beam; a chain needs none.
        """
        first, level_scores = len(self.tokens), np.zeros((1, 1), dtype=np.float32)
        self.depth += 1
        if self.width == 1:
            children = np.array([tokens])
            self.draft_logits.append(logits)
        else:
            assert logits is not None
            best = logits.log_softmax(-1).topk(min(self.width, logits.shape[-1]))
            level_scores, children = best.values.cpu().numpy(), best.indices.cpu().numpy()
        if first:
            level_scores = level_scores + self.scores[self.beam][:, None]
        self.tokens += children.ravel().tolist()
        self.parents += np.repeat(self.beam, children.shape[1]).tolist()
        self.scores = np.append(self.scores, level_scores.ravel())
        chosen = top_nodes(level_scores.ravel(), self.width)
        self.beam = (first + chosen).tolist()
        rows: list[int] = (chosen // children.shape[1]).tolist()
        return rows

    def ancestor_masks(self) -> tuple[int, ...]:
        """Return the ancestor mask of each beam node, and assign the next slots to the beam."""
        begin = len(self.node_masks) - 1
        masks = tuple(self.node_masks[self.parents[node]] for node in self.beam)
        for slot, (node, seen) in enumerate(zip(self.beam, masks, strict=True), begin):
            self.node_masks[node] = seen | 1 << slot
        return masks

    def path(self, node: int) -> list[int]:
        """Return the tokens from the text to a node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def best_nodes(self, count: int) -> list[int]:
        """Return the most probable nodes, parents before children."""
        # Where a token is certain, a node is as likely as its parent, which was found before it.
        return sorted(top_nodes(self.scores, count).tolist())

    def parent_rows(self, nodes: Sequence[int]) -> list[int]:
        """Return the parent row of each row: the last token, then these nodes."""
        rows = {node: row for row, node in enumerate((-1, *nodes))}
        return [-1, *(rows[self.parents[node]] for node in nodes)]


def top_nodes(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the highest scores in falling order, banned tokens excluded."""
    indices = np.argsort(-scores, kind="stable")[:count]
    return indices[scores[indices] > BANNED_LOGIT / 2]


def accepted_path(
    parents: Sequence[int], tokens: Sequence[int], predicted: Sequence[int]
) -> list[int]:
    """Return the rows from the root on whose token the target predicts in the parent row.

    Args:
        parents: parent row of each row.
        tokens: tokens of all rows but the root.
        predicted: token that the target predicts in each row.
    """
    edges = zip(parents[1:], tokens, strict=True)
    children = {(parent, token): row for row, (parent, token) in enumerate(edges, 1)}
    path, row = [0], children.get((0, predicted[0]))
    while row is not None:
        path.append(row)
        row = children.get((row, predicted[row]))
    return path
