"""EAGLE-3: a draft that continues from the target's hidden states proposes a tree of tokens."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import ceil
from typing import Annotated

from torch import Tensor

from outpace.decoding import (
    CAUSAL,
    Decoding,
    Dial,
    Forward,
    Kind,
    OptionError,
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
from outpace.decoding.branches import DraftTree, accepted_path
from outpace.decoding.tree import MAX_TREE_SLOTS
from outpace.methods.bounds import check_at_least_one
from outpace.methods.copies import LookupOption
from outpace.methods.features import FeatureBuffer
from outpace.methods.loose import FLY_ENTROPY, FLY_WINDOW, FlyEntropy, FlyWindow, check_fly
from outpace.methods.method import Interval, Method

TreeDrafting = Generator[Forward, Prediction, DraftTree]


@dataclass(frozen=True, kw_only=True)
class Eagle(Method):
    """Draft a tree token by token from the target's features, verify it in one pass.

    "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (Li
    et al., 2025), with the trees of EAGLE-2 (Li et al., 2024). Lossless except with verify="fly":
    the output follows the target's distribution. A tree, whose tokens are not drawn, needs
    verify="match".
    """

    roles = {"draft": (Kind.EAGLE,)}
    tree_option = "width"

    draft: Annotated[str, "name or folder of a draft for this target"]
    width: Annotated[
        int,
        Interval(1, 10),
        "nodes of each level that are extended, and children of each; 1 is a chain",
    ] = 10
    depth: Annotated[
        int,
        Interval(1, 7),
        "levels that are extended; depth + 1 tokens are drafted in a row",
    ] = 7
    nodes: Annotated[
        int, Interval(2, MAX_TREE_SLOTS + 1), "rows that are verified, including the last token"
    ] = 60
    verify: Annotated[Verify, "rule by which a draft is accepted, as in Speculative"] = "match"
    lookup: LookupOption = False
    fly_window: FlyWindow = FLY_WINDOW
    fly_entropy: FlyEntropy = FLY_ENTROPY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(width=self.width, depth=self.depth)
        if not 2 <= self.nodes <= MAX_TREE_SLOTS + 1:
            message = f"nodes must be between 2 and {MAX_TREE_SLOTS + 1}, got {self.nodes}"
            raise OptionError("nodes", self.nodes, message)
        if self.width > 1 and self.width * max(self.depth - 1, 1) > MAX_TREE_SLOTS:
            message = f"width * (depth - 1) must be at most {MAX_TREE_SLOTS}, the size of a mask, "
            more = f"got width={self.width} and depth={self.depth}"
            raise OptionError("width", self.width, message + more)
        if self.width > 1 and self.verify != "match":
            message = (
                f"verify={self.verify!r} needs a chain, since drafts of a tree are not drawn: "
            )
            more = "set width=1, or verify='match'"
            raise OptionError("verify", self.verify, message + more)
        check_fly(self.verify, self.fly_window, self.fly_entropy, self.draft_depth)

    def slots_needed(self, prompt: int, max_tokens: int) -> int:
        """Return how many slots the text and a tree after it need, in target and draft."""
        tree_slots = 0 if self.width == 1 else max(self.nodes, self.width * self.depth)
        return prompt + max_tokens + tree_slots

    def length_range(self, target: Target, *, auto: bool) -> Dial | None:
        """Return the range of levels, which change the output except under "match"."""
        if self.verify != "match" or not auto:
            return None
        return Dial(
            values=range(1, self.draft_depth + 2),
            passes=lambda n, kept: [
                ("draft", kept, n > 1),  # the text since the last cycle
                ("draft", self.width, max(n - 2, 0)),
                # The slots of an accepted branch are not contiguous, so its rows run again.
                ("target", self.verified_rows(n) + (self.width > 1 < n) * (kept - 1), 1),
            ],
        )

    @property
    def draft_depth(self) -> int:
        """Tokens that are drafted in a row."""
        return min(self.depth + 1, self.nodes - 1)

    def verified_rows(self, value: int) -> int:
        """Return the number of verified rows for a tree of `value` - 1 levels, part of `nodes`."""
        if self.width == 1:
            return value
        return 1 + ceil((self.nodes - 1) * (value - 1) / self.draft_depth)

    def decode(self, request: Request) -> Decoding:
        """Grow a tree after the last token, accept the branch that agrees with the target."""
        features = FeatureBuffer(request, request.sample(), lookup=self.lookup)
        alive: bool | None = yield from features.decode_plain()
        while alive:
            n = len(request)
            value = request.choose_length(self.draft_depth + 1, features.unread, features.lost)
            depth = min(value - 1, request.limit - n - 1)
            if (alive := (yield from features.decode_undrafted(depth))) is not None:
                continue
            drafted = yield from self.grow_tree(request, features.take_states(), depth)
            ready = features.written_slots
            rows = drafted.best_nodes(self.verified_rows(value) - 1)
            tokens = [drafted.tokens[row] for row in rows]
            parents, chain = drafted.parent_rows(rows), self.width == 1
            tree = Tree.from_parents(n - 1, parents)
            fly = self.fly_window, self.fly_entropy
            out = yield Forward(
                ids=[*request.ids[ready:], *tokens],
                start=ready,
                pattern=CAUSAL if chain else tree,
                positions=None if chain else tree.positions(ready),
                predict=[n + mask.bit_count() for mask in tree.ancestor_masks],
                predict_from=range(n - 1, n + len(tokens)),
                read=verify_read(request, self.verify, tokens, drafted.draft_logits, fly=fly),
                features_for="draft",
                branches=[drafted.path(row) for row in (-1, *rows)] if request.processors else None,
            )
            path = accepted_path(parents, tokens, out.tokens)
            assert out.features is not None
            features.add_states(out.features[[n - 1 - ready + row for row in path]])
            features.written_slots = features.stored_slots if chain else n
            logprobs = out.logprobs
            alive = request.commit(
                [out.tokens[row] for row in path],
                None if logprobs is None else [logprobs[row] for row in path],
            )

    def grow_tree(self, request: Request, features: Tensor, levels: int) -> TreeDrafting:
        """Draft `levels` levels after the text, from the features `[c, f]` of its last slots.

        The row of slot i combines its features with the next token. The hidden states of a level
        enter with the next one, in slots after the text.
        """
        n, drafted = len(request), DraftTree(self.width)
        read = self.level_read(request)
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
            if self.width > 1:
                pattern = Tree(n - 1, drafted.ancestor_masks())

    def level_read(self, request: Request) -> Read:
        """Return how the draft reads a level: a chain samples tokens, a tree keeps logits."""
        if self.width > 1:
            return Sample(keep=True)
        return draft_read(request, self.verify, match=request.sample())
