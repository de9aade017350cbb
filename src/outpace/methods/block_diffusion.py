"""Block diffusion: block after block, each of which sees itself and those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outpace.decoding import Canvas, Decoding, Kind, OptionError, Request
from outpace.decoding.canvas import split_blocks
from outpace.decoding.tree import MAX_TREE_SLOTS
from outpace.methods.block_filling import BlockFilling, block_length, forward_of_blocks
from outpace.methods.bounds import check_at_least_one, check_default, check_fraction
from outpace.methods.edited import decode_edited
from outpace.methods.lookahead import Lookahead, check_lookahead
from outpace.methods.prefix_filling import PREFIX_UNUSED, check_no_template, decode_prefixes
from outpace.methods.self_verified import decode_verified


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(BlockFilling):
    """Fill the holes of one block, then those of the next; keys of full blocks are cached.

    The sampler of SDAR (Cheng et al., 2025), and with `part` that of Fast-dLLM v2 (Wu et al.,
    2025). Blocks are counted from slot 0, so the end of the prompt shares one with the beginning of
    the answer. Keys of a block are final once it runs without holes, in the same forward as the
    first one of the next block. In a model of shift 1 that forward runs the full block only, and
    predicts the first token after it.

    With `edit` it is the joint threshold decoding of LLaDA2.1 (Bie et al., 2026), with `verify` the
    self-speculation of S2D2 (Han et al., 2026), whose output is that of blocks of one token, with
    `lookahead` the lookahead parallel decoding of LoPA (Xu et al., 2025).

    Attributes:
        canvas: fill all of the block in which the answer ends, as the authors' code does.
    """

    target_kinds = (Kind.BLOCK, Kind.CAUSAL_BLOCK)

    block: Annotated[int | None, "tokens of a block; as the model was trained by default"] = None
    canvas: Annotated[bool, "fill all of the block in which the answer ends"] = False
    edit: Annotated[
        float | None,
        "tokens of the open block are replaced by others of a higher confidence than this; 0: by "
        "any; None: never",
    ] = None
    verify: Annotated[bool, "emit only what blocks of one token would generate"] = False
    lookahead: Annotated[
        int | None,
        "further branches of the open block that each fill one more hole; the most confident "
        "branch continues",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(block=self.block, lookahead=self.lookahead)
        check_fraction(edit=self.edit)
        if self.edit is not None:
            unused = ("rule", "canvas", "lookahead")
            check_default(self, *unused, reason="edit, which fills whole blocks")
        if self.verify:
            check_default(
                self, *PREFIX_UNUSED, "edit", reason="verify, which drafts in one forward"
            )
        if self.lookahead is not None:
            check_default(self, "part", reason="lookahead, which compares whole blocks")
            if self.order == "left_to_right":
                message = "order must be a score with lookahead, got 'left_to_right'"
                raise OptionError("order", self.order, message)

    def check_request(self, request: Request) -> None:
        """Raise `ValueError` where the block length is unknown, or options do not fit."""
        size = block_length(request, self.block)
        if self.lookahead is not None:
            check_lookahead(self.lookahead, size)
        if request.constraint is not None:
            check_default(self, "edit", "lookahead", reason="a constraint or template")
        if request.target.mask_shift is not None:
            check_default(self, "edit", reason="a causal model, whose tokens have final keys")
        if request.target.mask_shift and not self.verify:
            check_default(self, *PREFIX_UNUSED, reason="a model whose masks predict the next slot")
            check_no_template(request)

    def slots_needed(self, prompt: int, max_tokens: int) -> int:
        """Return how many slots the text and the further branches of its last block need."""
        branches = self.lookahead or 0
        size = self.block or MAX_TREE_SLOTS // (branches + 1)
        return prompt + max_tokens + branches * size

    @property
    def is_sequential(self) -> bool:
        """Whether each token is conditioned on all before it, as only verification ensures."""
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
        history = self.start_history()
        start = 0  # first slot without final keys
        for begin, end in split_blocks(len(request) - len(request) % size, request.limit, size):
            canvas.append_slots(max(end - len(canvas), 0))
            step = fills = 0
            ahead: Lookahead | None = None
            while open_holes := canvas.holes_within(begin, end):
                holes, last = self.next_holes(open_holes, begin, end, request.target.shift)
                read = request.sample(step, scores=scores, score_as_drawn=True, joint=True)
                if ahead is not None:
                    holes, out = yield from ahead.run_branches(
                        request, canvas, begin, read, history
                    )
                else:
                    out = yield forward_of_blocks(
                        request.target,
                        canvas.ids[:last],
                        start=start,
                        size=size,
                        begin=begin,
                        predict=holes,
                        read=history.read(read, holes),
                    )
                may_fill = history.record(holes, out)
                chosen = self.choose_holes(out, self.least_count(size, fills), may_fill)
                if self.lookahead is not None:
                    chosen, ahead = Lookahead.spawn(self, holes, out, chosen, self.lookahead)
                canvas.fill_chosen(holes, chosen, out)
                start, step, fills = begin, step + 1, fills + (last == end)
                must_fill_block = self.canvas and canvas.holes_within(begin, end)
                if not must_fill_block and not canvas.commit_until(request):
                    return
        canvas.commit_until(request)
