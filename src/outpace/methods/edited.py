"""Decoding of block diffusion models that also replaces filled tokens (LLaDA2.1).

"LLaDA2.1: Speeding Up Text Diffusion via Token Editing" (Bie et al., 2026): a forward of a block
fills holes by one threshold (mask to token) and replaces filled tokens by another (token to token).
"""

from __future__ import annotations

import numpy as np

from outpace.decoding import Canvas, Decoding, Request
from outpace.decoding.canvas import split_blocks
from outpace.decoding.order import above_threshold
from outpace.methods.block_filling import BlockFilling, forward_of_blocks

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
            any_hole = np.ones(len(holes), dtype=np.bool_)
            chosen = method.choose_holes(out, method.least_count(size, fills), any_hole)
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
