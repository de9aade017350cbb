"""WeDLM: masks filled in any order under causal attention, and a prefix that streams out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from outpace.decoding import (
    Canvas,
    Decoding,
    Dial,
    Forward,
    Kind,
    OptionError,
    Prediction,
    Request,
    Target,
    agreement,
)
from outpace.decoding.dial import halved
from outpace.decoding.order import best
from outpace.decoding.target import Rank
from outpace.methods.bounds import at_least_one, not_negative, positive_fraction
from outpace.methods.method import Among, Method, Within, check_least
from outpace.methods.plain import plain


@dataclass(frozen=True, kw_only=True)
class WeDLM(Method):
    """Show a window of masks behind all that is known, and fill those that are in little doubt.

    Algorithm 1 of "WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention for
    Fast Inference" (Liu et al., 2025). Rows are fed with the known tokens first and keep their own
    positions, so that masks see what is filled behind them although attention is causal. A mask is
    filled where its entropy, and `penalty` for each slot between it and the first mask, add up to
    less than `entropy`; where none is, the least doubtful one (with `entropy=None`, always one).

    Without `eager` a token is emitted a forward later, once its key is final. With `verify` the
    output is that of `Autoregressive`, at any temperature.
    """

    decodes = (Kind.FILLING,)

    window: Annotated[int, Within(4, 32, log=True), "W: slots opened behind the leading run"] = 16
    entropy: Annotated[
        float | None,
        Within(0.05, 1.5, log=True),
        "τ: masks below it are filled; None fills one per forward, the least doubtful",
    ] = 0.4
    penalty: Annotated[
        float, Within(0, 0.1), "λ: added for each slot of distance from the first mask"
    ] = 0.02
    confidence: Annotated[
        float | None,
        "instead of entropy and penalty: fill the masks whose token has this probability",
    ] = None
    block: Annotated[bool, "stop and wait: the next window opens once the last one is full"] = False
    clip: Annotated[bool, "open no slot behind max_tokens"] = False
    eager: Annotated[bool, "emit a token once all before it are filled"] = True
    verify: Annotated[bool, Among((False, True)), "emit only what Autoregressive would say"] = False
    least: Annotated[
        int | None, "with pace=auto, the window may shrink to this, at 1 to none; None: it stays"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(window=self.window)
        not_negative(entropy=self.entropy, penalty=self.penalty)
        positive_fraction(confidence=self.confidence)
        check_least(self.least, window=self.window)
        if self.least is not None and self.verify:
            message = "least must be left out with verify, where no window changes the text"
            raise OptionError("least", self.least, message)

    @property
    def sequential(self) -> bool:
        """Only token by token is each seen with all in front of it."""
        return self.verify

    def slots(self, prompt: int, max_tokens: int) -> int:
        """Unless clipped, a window may open in front of the last token and, if late, another."""
        windows = 0 if self.clip or self.verify else 1 if self.eager else 2
        return prompt + max_tokens + max(windows * self.window - 1, 0)

    def dial(self, target: Target, *, auto: bool) -> Dial | None:
        """How far the window reaches; where all is verified, whether there is one."""
        if not auto or not (self.verify or self.least):
            return None
        values = halved(self.least or 1, self.window)
        if self.verify:  # the token behind a full window comes with it
            values = [1, values[-1] + 1]
        return Dial(
            values=values,
            # The window, and what was filled of the last one, which is fed once more.
            passes=lambda n, kept: [("target", 1 if n == 1 else n - self.verify + kept, 1)],
            nested=False,
        )

    def decode(self, request: Request) -> Decoding:
        """Refill the window, feed it in known-first order, fill what is sure, emit the prefix."""
        if self.verify:
            yield from self.verified(request)
            return
        canvas, ready, alive = Canvas.of(request), 0, True  # ready: slots with final keys
        read = request.sample()
        while alive:
            window = request.dial(self.window)
            if request.pace and window == self.least == 1 and not canvas.holes:
                request.canvas = ()
                alive = yield from plain(request, ready, read)
                ready = len(request) - 1
                continue
            if not request.canvas:
                canvas = Canvas.of(request)
            filled = canvas.filled
            self.refill(canvas, request.limit, window)
            out = yield self.forward(request, canvas, ready)
            ready = filled
            alive = canvas.commit(request, filled)
            self.fill(canvas, canvas.holes, out)
            if alive and self.eager:
                alive = canvas.commit(request)

    def verified(self, request: Request) -> Decoding:
        """The same, but tokens' rows, which predict the next token, say how much of it is kept."""
        canvas, ready, alive, read = Canvas.of(request), 0, True, request.sample()
        while alive:
            window = request.dial(self.window + 1) - 1
            if not window:
                request.canvas = ()
                alive = yield from plain(request, ready, read)
                ready = len(request) - 1
                continue
            if not request.canvas:
                canvas = Canvas.of(request)
            n, filled = len(request), canvas.filled
            self.refill(canvas, request.limit, window)
            out = yield self.forward(request, canvas, ready, checked=range(n, filled + 1))
            said = out.tokens[: filled + 1 - n]
            ready = n + agreement(canvas.ids[n:filled], said)
            alive = request.commit(said[: ready + 1 - n], out.logprobs)
            if ready < filled or not canvas.holes:
                canvas = Canvas.of(request)  # what lies behind a wrong token is of no use
            elif alive:
                drafts = canvas.holes[1:]
                canvas.fill([filled], said[-1:])
                self.fill(canvas, drafts, out, first=len(said))

    def refill(self, canvas: Canvas, limit: int, window: int) -> None:
        """Let the window reach so many slots behind the known prefix; a block, once it is full."""
        if self.block and canvas.holes:
            return
        end = canvas.filled + window
        end = min(end, limit) if self.clip or self.verify else end
        canvas.extend(max(end - len(canvas), 0))

    def forward(
        self, request: Request, canvas: Canvas, ready: int, checked: Sequence[int] = ()
    ) -> Forward:
        """Known tokens in front of the holes, each at its own position.

        The leading run comes first: its keys are those of the tokens before it alone, and the next
        forward starts behind it. `checked` are slots, the first hole included, that tokens predict.
        """
        known = canvas.known(ready)
        order = known + canvas.holes
        asked = canvas.holes[1:] if checked else canvas.holes
        end = ready + len(order)
        return Forward(
            ids=[canvas.ids[slot] for slot in order],
            start=ready,
            positions=order,
            predict=[*checked, *asked],
            predict_from=[*(slot - 1 for slot in checked), *range(end - len(asked), end)],
            read=request.sample(scores=self.scores if asked else (), joint=not checked),
        )

    @property
    def scores(self) -> tuple[Rank, ...]:
        """What the choice of holes looks at."""
        return ("entropy",) if self.confidence is None else ("confidence",)

    def fill(self, canvas: Canvas, holes: list[int], out: Prediction, first: int = 0) -> None:
        """Fill the holes of little doubt, at least one; `out` has them from entry `first` on."""
        if not holes:
            return
        if self.confidence is not None:
            scores = out.scores["confidence"][first:]
            chosen = np.flatnonzero(scores >= self.confidence)
        else:
            steps = np.array(holes, dtype=np.float32) - holes[0]
            doubt = out.scores["entropy"][first:] + self.penalty * steps
            scores = -doubt
            chosen = np.flatnonzero(doubt < (self.entropy or 0))
        canvas.take(holes, chosen if len(chosen) else best(scores), out, first)
