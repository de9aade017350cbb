"""Adaptive parallel decoding of a diffusion model, checked by a small autoregressive one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
import torch
from torch import Tensor

from outpace.decoding import (
    CAUSAL_KINDS,
    FULL,
    Decoding,
    Dial,
    Forward,
    Kind,
    Request,
    Sampling,
    Target,
    agreement,
    runs_triton,
    to_device,
)
from outpace.decoding.dial import MOST, halved
from outpace.decoding.sampling import Noisy, Read, Reader, Readout, chooser
from outpace.methods.bounds import at_least_one, fraction
from outpace.methods.method import Method, Within, check_least
from outpace.methods.plain import plain

Coupling = Literal["gumbel", "argmax"]


@dataclass(frozen=True, kw_only=True)
class APD(Method):
    """Keep the leading tokens on which diffusion marginals and their product with a verifier agree.

    Algorithm 1 of "Accelerating Diffusion LLMs via Adaptive Parallel Decoding" (Israel et al.,
    2025). `ratio` weighs the diffusion model against the verifier in the target distribution: 1
    takes every proposal, 0 keeps what the verifier would say. The first proposal is always kept.
    `window` and `lookahead` are the paper's W (tokens whose keys are computed again) and M (masks
    shown). `least` is a shorter lookahead that a `Pace` may choose, where the text is to depend on
    the load; at 1, no mask is shown where the last token's row says the next one. `coupling` draws
    the target with the noise of the proposal, as the paper has it, or takes its arg-max on raw
    logits, as the authors' code does.
    """

    decodes = (Kind.DIFFUSION,)
    roles = {"verifier": CAUSAL_KINDS}

    verifier: Annotated[str, "name or folder of the verifier"]
    ratio: Annotated[
        float, Within(0, 1), "R: weight of the target against the verifier, 0 to 1"
    ] = 0.7
    window: Annotated[
        int | None,
        Within(2, 64, log=True),
        "W: feed again the last group and window − 1 tokens before it",
    ] = 16
    lookahead: Annotated[
        int | None, Within(4, 128, log=True), "M: masks shown, and so the most tokens per forward"
    ] = 100
    coupling: Annotated[Coupling, "how the verifier's y is drawn"] = "gumbel"
    least: Annotated[
        int | None,
        "with pace=auto, the lookahead may be as short as this, at 1 to no mask on "
        "Dream; None: it stays",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction(ratio=self.ratio)
        at_least_one(window=self.window, lookahead=self.lookahead)
        check_least(self.least, lookahead=self.lookahead)

    def dial(self, target: Target, *, auto: bool) -> Dial | None:
        """How many masks are shown."""
        if not auto or self.least is None or self.lookahead is None:
            return None
        window = min(self.window or 1, MOST)
        return Dial(
            values=halved(self.least, self.lookahead),
            passes=lambda value, kept: [
                ("target", window - 1 + kept + value - (value == target.shift), 1),
                ("verifier", value, value > 1),
            ],
        )

    def decode(self, request: Request) -> Decoding:
        """Propose all holes in one pass, check them in another, keep the leading agreement."""
        target = request.sampling if self.coupling == "gumbel" else Sampling()
        begin, ready, step, alive = 0, 0, 0, True  # ready: verifier slots that hold output
        read: Read | None = None  # where no mask is shown
        while alive:
            n = len(request)
            shown = request.dial(self.lookahead or request.max_tokens, behind=n - ready)
            start, begin = begin, 0 if self.window is None else max(n - self.window + 1, 0)
            if request.pace and shown == self.least == request.target.shift:
                read = read or request.sample(step)
                alive = yield from plain(request, start, read, FULL, self.window)
                begin = 0 if self.window is None else max(len(request) - self.window, 0)
                continue
            end = min(n + shown, request.limit)
            guess = yield Forward(
                ids=request.ids[start:] + request.ahead(end),
                start=start,
                pattern=FULL,
                predict=range(n, end),
                read=request.sample(step, keep=end - n > 1, joint=True),
            )
            kept = 1
            if end - n > 1:
                assert guess.logits is not None
                checked = yield Forward(
                    ids=(request.ids + guess.tokens[:-1])[ready:],
                    start=ready,
                    predict=range(n + 1, end),
                    read=Mixture(
                        guess=guess.logits[1:], ratio=self.ratio, sampling=target, step=step
                    ),
                    model="verifier",
                )
                kept += agreement(guess.tokens[1:], checked.tokens)
                ready = min(n + kept, end - 1)
            read, step = None, step + 1
            alive = request.commit(guess.tokens[:kept], guess.logprobs)


@dataclass(frozen=True, kw_only=True)
class Mixture(Read):
    """Tokens of the product of a guess and this model, weighed by `ratio` (section 4.1).

    `guess [r, vocab]` are raw logits of the same slots; vocabularies are cut to the shorter.
    The request's temperature and top-p apply to the product as they did to the guess, so that at
    ratio 1 both laws, and with the same noise both samples, are the same.
    """

    guess: Tensor
    ratio: float
    sampling: Sampling
    step: int

    @classmethod
    def group(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        choose = chooser([r.sampling for r in reads], [r.step for r in reads], slots, device)
        guess = torch.cat([read.guess for read in reads]) if len(reads) > 1 else reads[0].guess
        ratios = np.repeat([r.ratio for r in reads], [len(r.guess) for r in reads])
        ratio = to_device(ratios.astype(np.float32), device)

        def read(logits: Tensor, rows: slice) -> Readout:
            vocab = min(guess.shape[-1], logits.shape[-1])
            mine, other, weight = logits[:, :vocab], guess[rows, :vocab], ratio[rows]
            if runs_triton(device) and isinstance(choose, Noisy):
                return Readout(choose.at_once(mine, rows, other, weight)[0], {})
            mixed = torch.lerp(mine.float(), other.float(), weight[:, None])
            return Readout(choose(mixed, rows), {})

        return read
