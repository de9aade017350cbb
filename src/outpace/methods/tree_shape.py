"""Sizes of the trees and chains that an EAGLE draft proposes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from outpace.decoding import OptionError, Verify
from outpace.decoding.tree import MAX_TREE_SLOTS
from outpace.methods.bounds import check_at_least_one

TREE_WIDTH, TREE_DEPTH = 10, 7
"""Default sizes of a tree, those of EAGLE's authors."""

MTP_DEPTH = 2
"""Default depth of a head for multi-token prediction, which is trained for a few tokens."""


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Size of a draft: `width` nodes per level, `depth` extensions, `nodes` verified rows."""

    width: int
    depth: int
    nodes: int

    @classmethod
    def from_options(
        cls, width: int | None, depth: int | None, nodes: int, *, is_chain: bool, is_mtp: bool
    ) -> TreeShape:
        """Return the shape of some options, with defaults for a chain and for an MTP head."""
        return cls(
            width=width or (1 if is_chain or is_mtp else TREE_WIDTH),
            depth=depth or (MTP_DEPTH if is_mtp else TREE_DEPTH),
            nodes=nodes,
        )

    def check(self, verify: Verify) -> None:
        """Raise `OptionError` for a size that cannot be verified in one pass, or by a rule."""
        width, depth, nodes = self.width, self.depth, self.nodes
        check_at_least_one(width=width, depth=depth)
        check_nodes(nodes)
        if width > 1 and width * max(depth - 1, 1) > MAX_TREE_SLOTS:
            message = f"width * (depth - 1) must be at most {MAX_TREE_SLOTS}, the size of a mask, "
            more = f"got width={width} and depth={depth}"
            raise OptionError("width", width, message + more)
        if width > 1 and verify != "match":
            message = f"verify={verify!r} needs a chain, since drafts of a tree are not drawn: "
            raise OptionError("verify", verify, f"{message}set width=1, or verify='match'")

    @property
    def extra_slots(self) -> int:
        """Slots after the text that a tree needs; a chain is part of the text."""
        return 0 if self.width == 1 else max(self.nodes, self.width * self.depth)

    @property
    def draft_depth(self) -> int:
        """Tokens that are drafted in a row."""
        return min(self.depth + 1, self.nodes - 1)

    def verified_rows(self, value: int) -> int:
        """Return the number of verified rows for a tree of `value` - 1 levels, part of `nodes`."""
        if self.width == 1:
            return value
        return 1 + ceil((self.nodes - 1) * (value - 1) / self.draft_depth)


def check_nodes(nodes: int) -> None:
    """Raise `OptionError` for a number of rows that cannot be verified in one pass."""
    if not 2 <= nodes <= MAX_TREE_SLOTS + 1:
        message = f"nodes must be between 2 and {MAX_TREE_SLOTS + 1}, got {nodes}"
        raise OptionError("nodes", nodes, message)


def check_width(width: int) -> None:
    """Raise `OptionError` for a level of more nodes than a tree may have."""
    if width > MAX_TREE_SLOTS:
        message = f"width must be at most {MAX_TREE_SLOTS}, the size of a mask, got {width}"
        raise OptionError("width", width, message)
