"""Adaptive parallel decoding: a diffusion model proposes, a small autoregressive one verifies."""

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
    Forward,
    Kind,
    LengthRange,
    Request,
    Sampling,
    Target,
    agreement,
    runs_triton,
    to_device,
)
from outpace.decoding.draft_length import MAX_PACED_TOKENS, halving_values
from outpace.decoding.sampling import GroupReader, NoisyChooser, Read, Readout, row_chooser
from outpace.field_types import Fraction, PositiveInt
from outpace.methods.method import Method, check_least, decode_plain

Coupling = Literal["gumbel", "independent", "argmax"]


@dataclass(frozen=True, kw_only=True)
class APD(Method):
    """Accept leading tokens on which diffusion marginals and their product with a verifier agree.

    Algorithm 1 of "Accelerating Diffusion LLMs via Adaptive Parallel Decoding" (Israel et al.,
    2025). `ratio` weighs the diffusion model against the verifier in the target distribution: 1
    accepts every proposal, 0 only what the verifier would generate. The first proposal is always
    accepted. `window` and `lookahead` are the paper's W (tokens whose keys are recomputed) and M
    (number of masks). `least` is a shorter lookahead that a `Pace` may choose, if the text may
    depend on the load; at 1 there is no mask, where the row of the last token predicts the next
    one. `coupling` draws the target with the noise of the proposal, as in the paper, or with other
    noise, or takes the arg-max of raw logits, as in the authors' code.
    """

    target_kinds = (Kind.DIFFUSION,)
    roles = {"verifier": CAUSAL_KINDS}

    verifier: Annotated[str, "name or folder of the verifier"]
    ratio: Annotated[Fraction, "R: weight of the target against the verifier, 0 to 1"] = 0.7
    window: Annotated[
        PositiveInt | None, "W: recompute the last group and window − 1 tokens before it"
    ] = 16
    lookahead: Annotated[
        PositiveInt | None, "M: number of masks, and so the most tokens per forward"
    ] = 100
    coupling: Annotated[Coupling, "how the verifier's y is drawn"] = "gumbel"
    least: Annotated[
        int | None,
        "with pace=auto, the shortest lookahead, at 1 no mask on Dream; None: it is fixed",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self.least, lookahead=self.lookahead)

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        if not auto or self.least is None or self.lookahead is None:
            return None
        window = min(self.window or 1, MAX_PACED_TOKENS)
        return LengthRange(
            values=halving_values(self.least, self.lookahead),
            passes=lambda value, kept: [
                ("target", window - 1 + kept + value - (value == target.shift), 1),
                ("verifier", value, value > 1),
            ],
        )

    def decode(self, request: Request) -> Decoding:
        """Propose all holes in one pass, verify them in another, accept the leading agreement."""
        target = Sampling() if self.coupling == "argmax" else request.sampling
        begin, ready, step, alive = 0, 0, 0, True  # ready: verifier slots that hold the text
        read: Read | None = None  # of plain decoding
        while alive:
            n = len(request)
            num_masks = request.choose_length(
                self.lookahead or request.max_tokens, unread=n - ready
            )
            start, begin = begin, 0 if self.window is None else max(n - self.window + 1, 0)
            if request.pace and num_masks == self.least == request.target.shift:
                read = read or request.sample(step)
                alive = yield from decode_plain(request, start, read, FULL, self.window)
                begin = 0 if self.window is None else max(len(request) - self.window, 0)
                continue
            end = min(n + num_masks, request.limit)
            guess = yield Forward(
                ids=request.ids[start:] + request.lookahead_ids(end),
                start=start,
                pattern=FULL,
                predict=range(n, end),
                read=request.sample(step, keep=end - n > 1, joint=True),
            )
            accepted = 1
            # The first token is that of the diffusion model alone, and needs no verifier.
            if end - n > 1:
                assert guess.logits is not None
                checked = yield Forward(
                    ids=(request.ids + guess.tokens[:-1])[ready:],
                    start=ready,
                    predict=range(n + 1, end),
                    read=Mixture(
                        guess=guess.logits[1:],
                        ratio=self.ratio,
                        sampling=target,
                        # No proposal has a negative step.
                        step=-1 - step if self.coupling == "independent" else step,
                    ),
                    model="verifier",
                )
                # It has not read the last guess, and rows after a rejected one are void.
                accepted += agreement(guess.tokens[1:], checked.tokens)
                ready = min(n + accepted, end - 1)
            read, step = None, step + 1
            alive = request.commit(guess.tokens[:accepted], guess.logprobs)


@dataclass(frozen=True, kw_only=True)
class Mixture(Read):
    """Tokens of the product of a guess and this model, weighted by `ratio` (section 3.2).

    `guess [r, vocab]` are raw logits of the same slots; both vocabularies are cut to the shorter.
    The request's temperature and top-p apply to the product as they did to the guess. At ratio 1
    both distributions, and with the same noise both samples, are therefore equal.
    """

    guess: Tensor
    ratio: float
    sampling: Sampling
    step: int

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        choose = row_chooser([r.sampling for r in reads], [r.step for r in reads], slots, device)
        guess = torch.cat([read.guess for read in reads]) if len(reads) > 1 else reads[0].guess
        ratios = np.repeat([r.ratio for r in reads], [len(r.guess) for r in reads])
        ratio = to_device(ratios.astype(np.float32), device)

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            vocab = min(guess.shape[-1], logits.shape[-1])
            verifier_logits, guess_logits, own_ratio = (
                logits[:, :vocab],
                guess[rows, :vocab],
                ratio[rows],
            )
            if runs_triton(device) and isinstance(choose, NoisyChooser):
                return Readout(
                    choose.read_fused(verifier_logits, rows, guess_logits, own_ratio)[0], {}
                )
            product = torch.lerp(verifier_logits.float(), guess_logits.float(), own_ratio[:, None])
            return Readout(choose(product, rows), {})

        return read_chunk
