"""EAGLE-3 and MTP: a draft that continues from hidden states proposes a tree or a chain."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from outpace.decoding import (
    CAUSAL,
    Decoding,
    Forward,
    Kind,
    LengthRange,
    Pattern,
    Prediction,
    Read,
    Request,
    Sample,
    Target,
    Tree,
    Verify,
    draft_read,
    verify_read,
)
from outpace.decoding.tree import MAX_TREE_SLOTS, DraftTree
from outpace.field_types import Bounds, PositiveInt
from outpace.methods.copies import LookupOption
from outpace.methods.features import FeatureBuffer, TreeShape
from outpace.methods.method import Method

TreeDrafting = Generator[Forward, Prediction, DraftTree]


@dataclass(frozen=True, kw_only=True)
class Eagle(Method):
    """Draft a tree token by token from the target's features, verify it in one pass.

    "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (Li
    et al., 2025), with the trees of EAGLE-2 (Li et al., 2024). The draft may also be the head for
    multi-token prediction (MTP) in the target's own checkpoint (DeepSeek-V3, 2024). Lossless: the
    output follows the target's distribution. A tree, whose tokens are not drawn, needs
    verify="match".
    """

    roles = {"draft": (Kind.EAGLE,)}
    tree_option = "width"

    draft: Annotated[
        str, "name or folder of a draft; auto: the target's own MTP head, or a listed draft"
    ] = "auto"
    width: Annotated[
        PositiveInt | None,
        "nodes extended per level, and children of each; 1, a chain, for MTP heads, recurrent "
        "targets and other rules than match, else 10",
    ] = None
    depth: Annotated[
        PositiveInt | None,
        "levels that are extended: depth + 1 tokens in a row; 2 for MTP heads, else 7",
    ] = None
    nodes: Annotated[
        int, Bounds(2, MAX_TREE_SLOTS + 1), "rows that are verified, including the last token"
    ] = 60
    verify: Annotated[Verify, "rule by which a draft is accepted, as in Speculative"] = "match"
    lookup: LookupOption = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape(Target()).check(self.verify)

    def slots_needed(self, prompt: int, max_tokens: int) -> int:
        return prompt + max_tokens + self.shape(Target()).extra_slots

    def shape(self, target: Target) -> TreeShape:
        """Return the size of the drafts for a target."""
        return TreeShape.from_options(
            *(self.width, self.depth, self.nodes),
            is_chain=target.is_recurrent or self.verify != "match",
            is_mtp=target.has_mtp_draft,
        )

    def fit_target(self, target: Target) -> Eagle:
        shape = self.shape(target)
        return replace(self, width=shape.width, depth=shape.depth)

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        if self.verify != "match" or not auto:
            return None
        shape = self.shape(target)
        return LengthRange(
            values=range(1, shape.draft_depth + 2),
            passes=lambda n, kept: [
                ("draft", kept, n > 1),  # the text since the last cycle
                ("draft", shape.width, max(n - 2, 0)),
                # The slots of an accepted branch are not contiguous, so its rows run again.
                ("target", shape.verified_rows(n) + (shape.width > 1 < n) * (kept - 1), 1),
            ],
        )

    @property
    def is_resumable(self) -> bool:
        return self.verify == "match"

    def decode(self, request: Request) -> Decoding:
        """Grow a tree after the last token, accept the branch that agrees with the target."""
        features = FeatureBuffer(request, request.sample(), lookup=self.lookup)
        shape = self.shape(request.target)
        alive: bool | None = yield from features.decode_plain()
        while alive:
            n = len(request)
            value = request.choose_length(shape.draft_depth + 1, features.unread, features.lost)
            depth = min(value - 1, request.limit - n - 1)
            if (alive := (yield from features.decode_undrafted(depth))) is not None:
                continue
            drafted = yield from self.grow_tree(request, features.take_states(), shape.width, depth)
            nodes = drafted.best_nodes(shape.verified_rows(value) - 1)
            tokens = [drafted.tokens[node] for node in nodes]
            read = verify_read(request, self.verify, tokens, drafted.draft_logits)
            alive = yield from features.verify_nodes(drafted, nodes, read)

    def grow_tree(
        self, request: Request, features: Tensor, width: int, levels: int
    ) -> TreeDrafting:
        """Draft `levels` levels after the text, from the features `[c, f]` of its last slots."""
        # The row of slot i combines its features with the next token. The hidden states of a level
        # enter with the next one, in slots after the text.
        n, drafted = len(request), DraftTree(width)
        read: Read = Sample(keep=True)
        if width == 1:
            read = draft_read(request, self.verify, match=request.sample())
        ids, start = request.ids[n - len(features) :], n - 1 - len(features)
        pattern: Pattern = CAUSAL
        while True:
            size = len(drafted.beam)
            end = start + len(ids)
            out = yield Forward(
                ids=ids,
                start=start,
                pattern=pattern,
                positions=pattern.positions(start) if isinstance(pattern, Tree) else None,
                predict=[n + drafted.depth] * size,
                predict_from=range(end - size, end),
                read=read,
                model="draft",
                features=features,
                features_for="draft",
                branches=[drafted.path(node) for node in drafted.beam]
                if request.processors
                else None,
            )
            assert out.features is not None
            rows = drafted.add_level(out.tokens, out.logits)
            if drafted.depth == levels or not drafted.beam:
                return drafted
            features = out.features[-size:][rows]
            ids, start = [drafted.tokens[node] for node in drafted.beam], end
            if width > 1:
                pattern = Tree(n - 1, drafted.ancestor_masks())
