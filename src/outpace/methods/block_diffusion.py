"""Block diffusion: block after block, each of which sees itself and those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated

import numpy as np

from outpace.decoding import (
    Canvas,
    Decoding,
    Forward,
    Kind,
    OptionError,
    Prediction,
    Read,
    Request,
    Tree,
    agreement,
)
from outpace.decoding.canvas import split_blocks
from outpace.decoding.order import above_threshold
from outpace.decoding.target import Rank
from outpace.decoding.tree import MAX_TREE_SLOTS
from outpace.field_types import Fraction, PositiveInt
from outpace.methods.block_filling import BlockFilling, block_length, forward_of_blocks
from outpace.methods.method import check_default

MAX_EDIT_FORWARDS = 16
"""Most forwards of a full block that edit it, as in the authors' code."""


def decode_edited(method: BlockFilling, request: Request, size: int, threshold: float) -> Decoding:
    """Fill and edit a block until a forward changes nothing, commit it, repeat.

    The options of `method` choose the holes. Filled tokens are replaced by others of a confidence
    above `threshold`; those of the prompt are not.
    """
    canvas, shift = Canvas.from_request(request), request.target.shift
    scores = tuple(dict.fromkeys((*method.needed_scores, "confidence")))
    start = 0  # first slot without final keys
    for begin, end in split_blocks(len(request) - len(request) % size, request.limit, size):
        canvas.append_slots(max(end - len(canvas), 0))
        # With shift 1 the first slot is predicted once, by a block that no longer changes.
        editable = canvas.holes_within(begin + shift, end)
        step = fills = edits = 0
        while (open_holes := canvas.holes_within(begin, end)) or (
            editable and edits < MAX_EDIT_FORWARDS
        ):
            filled = [slot for slot in editable if slot not in open_holes]
            holes, last = method.next_holes(open_holes, begin, end, shift)
            read = request.sample(step, scores=scores, score_as_drawn=True)
            predict = [*holes, *filled]
            out = yield forward_of_blocks(
                request.target,
                canvas.ids[:last],
                start=start,
                size=size,
                begin=begin,
                predict=predict,
                read=read,
            )
            chosen = method.choose_holes(out, method.least_count(size, fills), len(holes))
            canvas.fill_chosen(holes, chosen, out)
            certain = above_threshold(out.scores["confidence"][len(holes) :], threshold)
            changed = canvas.replace_chosen(filled, certain, out, len(holes))
            start, step, fills = begin, step + 1, fills + (last == end)
            edits += not holes
            if not holes and not changed:
                start = end - shift  # this forward has written the final keys
                break
        if not canvas.commit_until(request):
            return


def decode_verified(request: Request, size: int, threshold: float | None) -> Decoding:
    """Draft a block of `size` masks at a time, and verify its leading tokens above `threshold`."""
    # Each forward verifies the last draft, and drafts what follows if all of it is right.
    scores: tuple[Rank, ...] = () if threshold is None else ("confidence",)
    read = request.sample(scores=scores, score_as_drawn=True)
    make_forward = forward_of_rows if request.target.shift else forward_of_masks
    ready, alive, drafted = 0, True, list[int]()  # ready: slots that hold the text
    while alive:
        n, first = len(request), len(drafted) + 1
        out = yield make_forward(request, ready, drafted, size, read)
        accepted = agreement(drafted, out.tokens)
        alive, ready = request.commit(out.tokens[: accepted + 1], out.logprobs), n + accepted
        count = count_certain(out, first, threshold) if accepted == len(drafted) else 0
        room = request.limit - len(request) - 1
        if not request.target.shift:  # each draft has a mask that verifies it
            room = min(room // 2, MAX_TREE_SLOTS)
        drafted = out.tokens[first : first + min(count, room)]


def forward_of_rows(
    request: Request, ready: int, drafted: Sequence[int], size: int, read: Read
) -> Forward:
    """Return a forward of the text and the drafts in blocks of one token, then a block of masks."""
    # In a model of shift 1 the rows of tokens verify, and those of masks draft: the next slots, or
    # with a `mask_shift` of 0 their own, of which the first is that of the verified token.
    n, last = len(request), len(request) + len(drafted)
    end, own = min(last + size, request.limit), request.target.mask_shift == 0
    count = end - 1 - last
    masks = [request.target.mask_id] * (count + (own and count > 0))
    tokens = [*request.ids[ready:], *drafted]
    return Forward(
        ids=[*tokens, *masks],
        start=ready,
        pattern=(*repeat(1, len(tokens)), *[len(masks)] * bool(masks)),
        predict=range(n, end),
        predict_from=[*range(n - 1, last), *range(last + 1, end)] if own else None,
        read=read,
    )


def forward_of_masks(
    request: Request, ready: int, drafted: Sequence[int], size: int, read: Read
) -> Forward:
    """Return a forward of the drafts, a block of masks after them, and masks in blocks of one."""
    # In a model of shift 0 the last masks verify: each sees the text, the drafts before its slot,
    # and itself. The prompt runs with one of them only, since a tree cannot be split.
    n, count, mask = len(request), len(drafted), request.target.mask_id
    if ready < n - 1:
        ids = [*request.ids[ready:], mask]
        pattern = (1,) * len(ids)
        return Forward(ids=ids, start=ready, pattern=pattern, predict=[n], read=read)
    last = n + count
    width = min(size, request.limit - last - count - 1, MAX_TREE_SLOTS - count)
    width = width if width > 1 else 0  # the first mask has the slot that is verified last
    chain = [(1 << index) - 1 for index in range(count + 1)]
    block = [(1 << count + width) - 1] * width
    first = last + width  # slot of the first mask that verifies
    return Forward(
        ids=[*request.ids[ready:], *drafted, *[mask] * (width + count + 1)],
        start=ready,
        pattern=Tree(n, (*chain[:count], *block, *chain)),
        positions=[*range(ready, first), *range(n, last + 1)],
        predict=range(n, last + max(width, 1)),
        predict_from=[*range(first, first + count + 1), *range(last + 1, first)],
        read=read,
        branches=[
            *(drafted[:index] for index in range(count + 1)),
            *([*drafted, *[mask] * index] for index in range(1, width)),
        ],
    )


def count_certain(out: Prediction, first: int, threshold: float | None) -> int:
    if threshold is None:
        return len(out.tokens) - first
    unsure = np.flatnonzero(out.scores["confidence"][first:] <= threshold)
    return int(unsure[0]) if len(unsure) else len(out.tokens) - first


PREFIX_UNUSED = ("budget", "steps", "order", "part", "canvas")
"""Options of the other ways to fill a block."""


def decode_prefixes(request: Request, size: int, threshold: float | None) -> Decoding:
    """Predict `size` tokens at a time, and accept the leading ones above `threshold`."""
    # At least one is; with `threshold=None` exactly one. Each forward runs the tokens that the one
    # before accepted again, for causal keys.
    ready, alive = 0, True  # ready: slots with final keys
    while alive:
        n, end = len(request), min(len(request) + size, request.limit)
        masks = [request.target.mask_id] * (end - n - 1)
        read = request.sample(scores=("confidence",), score_as_drawn=True, joint=True)
        out = yield Forward(
            ids=[*request.ids[ready:], *masks],
            start=ready,
            pattern=(*repeat(1, n - 1 - ready), 1 + len(masks)),
            predict=range(n, end),
            read=read,
        )
        accepted = 1 if threshold is None else max(count_certain(out, 0, threshold), 1)
        alive, ready = request.commit(out.tokens[:accepted], out.logprobs), n - 1


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(BlockFilling):
    """Fill the holes of one block, then those of the next; keys of full blocks are cached.

    The sampler of SDAR (Cheng et al., 2025), and with `part` that of Fast-dLLM v2 (Wu et al.,
    2025). Blocks are counted from slot 0, so the end of the prompt shares one with the beginning of
    the answer. Keys of a block are final once it runs without holes, in the same forward as the
    first one of the next block. In a model of shift 1 that forward runs the full block only, and
    predicts the first token after it.

    With `edit` it is the joint threshold decoding of LLaDA2.1 (Bie et al., 2026), with `verify` the
    self-speculation of S2D2 (Han et al., 2026), whose output is that of blocks of one token.
    """

    target_kinds = (Kind.BLOCK, Kind.CAUSAL_BLOCK)

    block: Annotated[
        PositiveInt | None, "tokens of a block; as the model was trained by default"
    ] = None
    canvas: Annotated[bool, "fill all of the block in which the answer ends"] = False
    edit: Annotated[
        Fraction | None,
        "tokens of the open block are replaced by others of a higher confidence than this; 0: by "
        "any; None: never",
    ] = None
    verify: Annotated[bool, "emit only what blocks of one token would generate"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.edit is not None:
            check_default(self, "canvas", reason="edit, which fills whole blocks")
        if self.verify:
            check_default(
                self, *PREFIX_UNUSED, "edit", reason="verify, which drafts in one forward"
            )

    def check_request(self, request: Request) -> None:
        block_length(request, self.block)
        if request.constraint is not None:
            check_default(self, "edit", reason="a constraint or template")
        if request.target.mask_shift is not None:
            check_default(self, "edit", reason="a causal model, whose tokens have final keys")
        if request.target.mask_shift and not self.verify:
            check_default(self, *PREFIX_UNUSED, reason="a model whose masks predict the next slot")
            if request.is_infill:
                raise OptionError(
                    "method", "BlockDiffusion", "cannot fill a template from left to right: omit it"
                )

    @property
    def is_sequential(self) -> bool:
        return self.verify

    @property
    def is_resumable(self) -> bool:
        return self.verify

    def decode(self, request: Request) -> Decoding:
        """Fill blocks, or also edit or verify them, or fill prefixes of blocks."""
        size = block_length(request, self.block)
        if self.verify:
            return decode_verified(request, size, self.threshold)
        if self.edit is not None:
            return decode_edited(self, request, size, self.edit)
        if request.target.mask_shift:
            return decode_prefixes(request, size, self.threshold)
        return self.decode_blocks(request, size)

    def decode_blocks(self, request: Request, size: int) -> Decoding:
        """Run the block and earlier slots without final keys, fill some of its holes, repeat."""
        canvas, scores = Canvas.from_request(request), self.needed_scores
        start = 0  # first slot without final keys
        for begin, end in split_blocks(len(request) - len(request) % size, request.limit, size):
            canvas.append_slots(max(end - len(canvas), 0))
            step = fills = 0
            while open_holes := canvas.holes_within(begin, end):
                holes, last = self.next_holes(open_holes, begin, end, request.target.shift)
                read = request.sample(step, scores=scores, score_as_drawn=True, joint=True)
                out = yield forward_of_blocks(
                    request.target,
                    canvas.ids[:last],
                    start=start,
                    size=size,
                    begin=begin,
                    predict=holes,
                    read=read,
                )
                chosen = self.choose_holes(out, self.least_count(size, fills), len(holes))
                canvas.fill_chosen(holes, chosen, out)
                # Keys of a block are final when it is full; until then all of its rows run again.
                start, step, fills = begin, step + 1, fills + (last == end)
                must_fill_block = self.canvas and canvas.holes_within(begin, end)
                if not must_fill_block and not canvas.commit_until(request):
                    return
        canvas.commit_until(request)
