"""WeDLM: masks filled in any order under causal attention, with a streaming prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated

import numpy as np

from outpace.decoding import (
    CAUSAL,
    Canvas,
    Decoding,
    Forward,
    Kind,
    LengthRange,
    OptionError,
    Prediction,
    Request,
    Target,
    agreement,
)
from outpace.decoding.draft_length import halving_values
from outpace.decoding.order import top_holes
from outpace.decoding.target import Rank
from outpace.field_types import NonNegativeFloat, PositiveFraction, PositiveInt
from outpace.methods.method import Method, check_least, decode_plain


@dataclass(frozen=True, kw_only=True)
class WeDLM(Method):
    """Append a window of masks to the filled tokens, and fill those of low entropy.

    Algorithm 1 of "WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention for
    Fast Inference" (Liu et al., 2025). Rows are reordered, filled tokens first, so masks see later
    ones although attention is causal. A mask is filled where its entropy, plus `penalty` per slot
    after the first mask, is below `entropy`; at least one is (with `entropy=None`, exactly one).
    Without `eager` a token is emitted one forward later, with its final key. With `verify` the
    output is that of `Autoregressive`.
    """

    target_kinds = (Kind.MASK_FILLING,)

    window: Annotated[PositiveInt, "W: slots opened after the prefix"] = 16
    entropy: Annotated[
        NonNegativeFloat | None,
        "τ: masks below it are filled; None fills one per forward, the lowest",
    ] = 0.4
    penalty: Annotated[
        NonNegativeFloat, "λ: added for each slot of distance from the first mask"
    ] = 0.02
    confidence: Annotated[
        PositiveFraction | None,
        "instead of entropy and penalty: fill the masks whose token has this probability",
    ] = None
    block: Annotated[bool, "stop and wait: the next window opens once the last one is full"] = False
    clip: Annotated[bool, "open no slot after max_tokens"] = False
    eager: Annotated[bool, "emit a token once all before it are filled"] = True
    verify: Annotated[bool, "emit only what Autoregressive would generate"] = False
    constant: Annotated[bool, "feed W rows per forward, as the paper, instead of W to 2W"] = False
    causal: Annotated[
        bool, "rows see those before them; false: the whole window, as trained with causal=false"
    ] = True
    least: Annotated[
        int | None, "with pace=auto, the smallest window, at 1 no masks; None: it is fixed"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self.least, window=self.window)
        if self.least is not None and self.verify:
            raise OptionError("least", self.least, "cannot change the text with verify: omit one")

    @property
    def is_sequential(self) -> bool:
        return self.verify

    @property
    def is_resumable(self) -> bool:
        return self.verify

    def slots_needed(self, prompt: int, max_tokens: int) -> int:
        windows = 0 if self.clip or self.verify else 1 if self.eager else 2
        return prompt + max_tokens + max(windows * self.window - 1, 0)

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        if not auto or not (self.verify or self.least):
            return None
        values = halving_values(self.least or 1, self.window)
        if self.verify:  # a full window also yields the token after it
            values = [1, values[-1] + 1]
        return LengthRange(
            values=values,
            # The window, and the filled tokens of the last one, which run once more.
            passes=lambda n, kept: [
                ("target", 1 if n == 1 else n - self.verify + (not self.constant) * kept, 1)
            ],
            nested=False,
        )

    def decode(self, request: Request) -> Decoding:
        """Refill the window, run it with filled tokens first, fill some holes, emit the prefix."""
        if self.verify:
            yield from self.decode_verified(request)
            return
        canvas, ready, alive = Canvas.from_request(request), 0, True  # ready: slots with final keys
        read = request.sample()
        while alive:
            window = request.choose_length(self.window)
            if request.pace and window == self.least == 1 and not canvas.holes:
                request.canvas = ()
                alive = yield from decode_plain(request, ready, read)
                ready = len(request) - 1
                continue
            if not request.canvas:
                canvas = Canvas.from_request(request)
            # Keys are final once a token ran with all tokens before it filled.
            filled = canvas.prefix_length
            self.refill_window(canvas, request, window, ready)
            out = yield self.window_forward(request, canvas, ready)
            ready = filled
            alive = canvas.commit_until(request, filled)
            self.fill_confident(canvas, canvas.holes, out)
            if alive and self.eager:
                alive = canvas.commit_until(request)

    def decode_verified(self, request: Request) -> Decoding:
        """Decode in the same way, and accept a prefix by the predictions of its tokens' rows."""
        canvas, ready, alive, read = Canvas.from_request(request), 0, True, request.sample()
        while alive:
            window = request.choose_length(self.window + 1) - 1
            if not window:
                request.canvas = ()
                alive = yield from decode_plain(request, ready, read)
                ready = len(request) - 1
                continue
            if not request.canvas:
                canvas = Canvas.from_request(request)
            n, filled = len(request), canvas.prefix_length
            self.refill_window(canvas, request, window, ready)
            out = yield self.window_forward(request, canvas, ready, checked=range(n, filled + 1))
            predicted = out.tokens[: filled + 1 - n]
            ready = n + agreement(canvas.ids[n:filled], predicted)
            alive = request.commit(predicted[: ready + 1 - n], out.logprobs)
            if ready < filled or not canvas.holes:
                canvas = Canvas.from_request(request)  # tokens after a wrong one are invalid
            elif alive:
                drafts = canvas.holes[1:]
                canvas.fill_slots([filled], predicted[-1:])
                self.fill_confident(canvas, drafts, out, first=len(predicted))

    def refill_window(self, canvas: Canvas, request: Request, window: int, ready: int) -> None:
        """Extend the canvas to `window` slots after the prefix; a block once it is full.

        A `constant` window begins after the slots with final keys, which end at `ready`.
        """
        if self.block and canvas.holes:
            return
        first = max(ready, len(request.prompt)) if self.constant else canvas.prefix_length
        end = first + window
        end = min(end, request.limit) if self.clip or self.verify else end
        canvas.append_slots(max(end - len(canvas), 0))

    def window_forward(
        self, request: Request, canvas: Canvas, ready: int, checked: Sequence[int] = ()
    ) -> Forward:
        """Return a forward of the filled tokens, then the holes, each at its position.

        The keys of the prefix depend only on earlier tokens; the next forward starts after it.
        `checked` are slots, the first hole included, that are predicted by the rows of tokens.
        """
        filled = canvas.filled_slots(ready)
        order = filled + canvas.holes
        wanted = canvas.holes[1:] if checked else canvas.holes
        end, prefix = ready + len(order), canvas.prefix_length
        is_causal = self.causal or not canvas.holes
        return Forward(
            ids=[canvas.ids[slot] for slot in order],
            start=ready,
            pattern=CAUSAL if is_causal else (*repeat(1, prefix - ready), end - prefix),
            positions=order,
            predict=[*checked, *wanted],
            predict_from=[*(slot - 1 for slot in checked), *range(end - len(wanted), end)],
            read=request.sample(scores=self.needed_scores if wanted else (), joint=not checked),
        )

    @property
    def needed_scores(self) -> tuple[Rank, ...]:
        return ("entropy",) if self.confidence is None else ("confidence",)

    def fill_confident(
        self, canvas: Canvas, holes: list[int], out: Prediction, first: int = 0
    ) -> None:
        """Fill the holes of low entropy, at least one; `out` has them from entry `first` on."""
        if not holes:
            return
        if self.confidence is not None:
            scores = out.scores["confidence"][first:]
            chosen = np.flatnonzero(scores >= self.confidence)
        else:
            distances = np.array(holes, dtype=np.float32) - holes[0]
            doubt = out.scores["entropy"][first:] + self.penalty * distances
            scores = -doubt
            chosen = np.flatnonzero(doubt < (self.entropy or 0))
        canvas.fill_chosen(holes, chosen if len(chosen) else top_holes(scores), out, first)
