"""Hidden states of the target that a draft has still to read, and the shape of draft trees."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from outpace.decoding import (
    CAUSAL,
    Forward,
    OptionError,
    Prediction,
    Read,
    Request,
    Tree,
    Verify,
    agreement,
)
from outpace.decoding.tree import MAX_TREE_SLOTS, DraftTree, accepted_path
from outpace.methods.copies import CopyFinder
from outpace.methods.method import decode_plain

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
        width, depth = self.width, self.depth
        if width > 1 and width * max(depth - 1, 1) > MAX_TREE_SLOTS:
            most = MAX_TREE_SLOTS // max(depth - 1, 1)
            raise OptionError("width", width, f"must be at most {most} with depth={depth}")
        if width > 1 and verify != "match":
            raise OptionError(
                "verify",
                verify,
                "must be 'match' with trees, whose drafts are not drawn, or set width=1",
            )

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


class FeatureBuffer:
    """Hidden states from the target that the draft has not read yet.

    Nothing is stored while the controller has drafting switched off. When drafting starts again,
    the text is run again with the last token, from the first slot without stored states. The text
    of a recurrent target cannot run again, so its states are always stored.
    """

    def __init__(self, request: Request, sample: Read, *, lookup: bool) -> None:
        self.request = request
        self.sample = sample
        self.copies = CopyFinder(1) if lookup else None
        self.written_slots = 0
        """Slots of the target that hold the text."""
        self.stored_slots = 0
        """Slots whose hidden states were received."""
        self.read_slots = 0
        """Slots whose hidden states the draft has read."""
        self.states: list[Tensor] = []

    @property
    def lost(self) -> int:
        """Number of slots whose hidden states were not stored."""
        return max(self.written_slots - self.stored_slots, 0)

    @property
    def unread(self) -> int:
        """Number of slots before the last token that the draft has not read yet."""
        return len(self.request) - 1 - self.read_slots

    def decode_undrafted(self, count: int) -> Generator[Forward, Prediction, bool | None]:
        """Verify a copy, or decode plainly where `count` is 0 or states were not stored.

        Returns whether to continue, or None if the draft proposes the next `count` tokens.
        """
        drafted = 0 if self.lost else count
        if self.copies and (copied := self.copies.replace_draft(self.request, drafted)):
            keep = self.keeps_states(wanted=count > 0)
            return (yield from self.verify_chain(copied, self.sample, keep=keep))
        return None if drafted else (yield from self.decode_plain(wanted=count > 0))

    def decode_plain(self, *, wanted: bool = False) -> Generator[Forward, Prediction, bool]:
        """Decode one token, and those that a constraint forces; return whether to continue.

        `wanted` is whether the next cycle drafts, which needs the hidden states.
        """
        request = self.request
        if wanted:
            request.cycle_length = 1
        keep = self.keeps_states(wanted=wanted)
        alive = yield from self.verify_chain(request.forced_tokens, self.sample, keep=keep)
        if alive and request.is_paused and not (request.target.is_recurrent or self.copies):
            alive = yield from decode_plain(request, self.written_slots, self.sample)
            self.written_slots = len(request) - 1
        return alive

    def keeps_states(self, *, wanted: bool) -> bool:
        """Return whether the next forward stores states; `wanted` is whether a draft follows."""
        if wanted or self.request.target.is_recurrent:
            return True
        return not (self.lost or self.request.skips_drafting(self.unread))

    def verify_chain(
        self, drafted: list[int], read: Read, *, keep: bool = True
    ) -> Generator[Forward, Prediction, bool]:
        """Verify drafted tokens and commit the accepted ones; return whether to continue.

        With `keep`, their hidden states are stored, and those before them that were not.
        """
        request, n = self.request, len(self.request)
        start = min(self.written_slots, self.stored_slots) if keep else self.written_slots
        out = yield Forward(
            ids=[*request.ids[start:], *drafted],
            start=start,
            predict=range(n, n + len(drafted) + 1),
            read=read,
            features_for="draft" if keep else None,
        )
        accepted = agreement(drafted, out.tokens)
        self.written_slots = n + accepted
        if out.features is not None:
            self.add_states(out.features[: n + accepted - start][self.stored_slots - start :])
        return request.commit(out.tokens[: accepted + 1], out.logprobs)

    def verify_nodes(
        self, drafted: DraftTree, nodes: Sequence[int], read: Read
    ) -> Generator[Forward, Prediction, bool]:
        """Verify nodes of a draft, parents before children, and commit the accepted path.

        The path of a tree is not contiguous in memory, so its rows run again; that of a chain is.
        Returns whether to continue.
        """
        request, n, start = self.request, len(self.request), self.written_slots
        is_chain = drafted.width == 1
        tokens = [drafted.tokens[node] for node in nodes]
        parents = drafted.parent_rows(nodes)
        tree = Tree.from_parents(n - 1, parents)
        out = yield Forward(
            ids=[*request.ids[start:], *tokens],
            start=start,
            pattern=CAUSAL if is_chain else tree,
            positions=None if is_chain else tree.positions(start),
            predict=[n + mask.bit_count() for mask in tree.ancestor_masks],
            predict_from=range(n - 1, n + len(tokens)),
            read=read,
            features_for="draft",
            branches=[drafted.path(node) for node in (-1, *nodes)] if request.processors else None,
        )
        path = accepted_path(parents, tokens, out.tokens)
        assert out.features is not None
        self.add_states(out.features[[n - 1 - start + row for row in path]])
        self.written_slots = self.stored_slots if is_chain else n
        logprobs = out.logprobs
        return request.commit(
            [out.tokens[row] for row in path],
            None if logprobs is None else [logprobs[row] for row in path],
        )

    def add_states(self, states: Tensor) -> None:
        self.states.append(states)
        self.stored_slots += len(states)

    def take_states(self) -> Tensor:
        """Return and remove all stored states `[c, f]`."""
        taken, self.states, self.read_slots = torch.cat(self.states), [], self.stored_slots
        return taken
