"""DFlash: a draft that reads the target's hidden states proposes a block in one pass."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor
from torch.nn import functional as F

from outpace.decoding import (
    FULL,
    MASKED_DRAFT_KINDS,
    Decoding,
    Forward,
    LengthRange,
    OptionError,
    Request,
    Sample,
    Target,
    Verify,
    draft_read,
    verify_read,
)
from outpace.decoding.draft_length import MAX_PACED_TOKENS
from outpace.field_types import Fraction, PositiveInt
from outpace.methods.copies import LookupOption
from outpace.methods.features import FeatureBuffer
from outpace.methods.method import DraftLength, Method, check_length


def draft_block(request: Request, features: Tensor, rows: int) -> Forward:
    """Return a forward of `rows` rows, the last committed token and masks, after `features`."""
    # A DFlash draft reads the features `[c, f]` of the previous slots as context. A fused one
    # combines them with the tokens of these slots, which are causal rows; the block has no
    # features.
    start, num_features = len(request) - 1, features.shape[0]
    block = [request.ids[start]] + [request.target.mask_id] * (rows - 1)
    if not request.target.adds_features:
        return Forward(ids=block, start=start, pattern=FULL, model="draft", context=features)
    return Forward(
        ids=[*request.ids[start - num_features : start], *block],
        start=start - num_features,
        pattern=(*(1,) * num_features, rows),
        model="draft",
        features=F.pad(features, (0, 0, 0, rows)),
    )


@dataclass(frozen=True, kw_only=True)
class DFlash(Method):
    """Draft a block in one pass from the target's features, verify it in another.

    "DFlash: Block Diffusion for Flash Speculative Decoding" (Chen et al., 2026, section 3).
    Lossless: the output follows the target's distribution. `block` is the
    last committed token and the masks after it (the trained length where None), of which `tokens`
    are verified: a number, or with "auto" the measured optimum, which may be 0. `verify` is as in
    `Speculative`. A draft with a confidence head ("DSpark", DeepSeek-AI, 2026) may propose fewer:
    those before the first one that the target would accept with a probability below
    `confidence_threshold`. This does not depend on the token itself, so rejection stays lossless.
    """

    roles = {"draft": MASKED_DRAFT_KINDS}

    draft: Annotated[str, "name or folder of a draft for this target"]
    block: Annotated[
        PositiveInt | None, "the last token and the masks after it; the trained length by default"
    ] = None
    tokens: Annotated[
        DraftLength, "proposals that are verified: a number, or the measured optimum"
    ] = "auto"
    confidence_threshold: Annotated[
        Fraction,
        "proposals end before one of a lower predicted acceptance; needs a draft that predicts it",
    ] = 0.0
    verify: Annotated[Verify, "rule by which a draft is accepted, as in Speculative"] = "match"
    lookup: LookupOption = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.tokens, self.verify)

    def check_request(self, request: Request) -> None:
        threshold = self.confidence_threshold
        if threshold and not request.target.predicts_acceptance:
            raise OptionError(
                "confidence_threshold",
                threshold,
                f"needs a confidence head, unlike {self.draft}: omit it",
            )

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        if self.verify != "match" or not (auto or self.tokens == "auto"):
            return None
        block = self.block or target.block or 1
        return LengthRange(
            values=range(1, min(self.cycle_limit(block, target), MAX_PACED_TOKENS) + 1),
            passes=lambda n, kept: [
                ("draft", min(block, MAX_PACED_TOKENS) + kept, n > 1),
                ("target", n, 1),
            ],
        )

    def cycle_limit(self, block: int, target: Target) -> int:
        """Return the most tokens of a cycle, including the one after the drafts."""
        most = block + target.drafts_from_last
        return most if self.tokens == "auto" else min(most, self.tokens + 1)

    @property
    def is_resumable(self) -> bool:
        return self.verify == "match"

    def decode(self, request: Request) -> Decoding:
        """Fill a block of masks after the last token, accept what agrees with the target."""
        trained = request.target.block or 1
        block = self.block or trained
        if block > trained:
            warnings.warn(
                f"block {block} is longer than the {trained} that {self.draft} was trained for",
                stacklevel=2,
            )
        features = FeatureBuffer(request, request.sample(), lookup=self.lookup)
        alive: bool | None = yield from features.decode_plain()
        while alive:
            n = len(request)
            rows = min(block, request.limit - n)
            most = min(self.cycle_limit(rows, request.target), request.limit - n)
            count = request.choose_length(most, features.unread, features.lost) - 1
            if (alive := (yield from features.decode_undrafted(count))) is not None:
                continue
            out = yield replace(
                draft_block(request, features.take_states(), rows),
                predict=range(n, n + count),
                read=self.block_read(request),
            )
            kept = len(out.tokens)
            if self.confidence_threshold:
                confident = out.scores["acceptance"] >= self.confidence_threshold
                kept = int(confident.cumprod().sum())
            drafted, guesses = out.tokens[:kept], None if out.logits is None else out.logits[:kept]
            alive = yield from features.verify_chain(
                drafted, verify_read(request, self.verify, drafted, [guesses])
            )

    def block_read(self, request: Request) -> Sample:
        """Return how the draft reads a block, with the predicted acceptance if it is used."""
        # Masks are independent of each other's noise, so the most probable tokens fit best.
        read = draft_read(request, self.verify, match=Sample(joint=request.joint_text))
        return (
            replace(read, scores=(*read.scores, "acceptance"))
            if self.confidence_threshold
            else read
        )
