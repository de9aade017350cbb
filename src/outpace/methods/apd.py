"""Adaptive parallel decoding of a diffusion model, checked by a small autoregressive one."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from outpace.decoding import FULL, Decoding, Forward, Sampling, Sequence, agreement
from outpace.decoding.sampling import Read, Reader, Readout, chooser
from outpace.methods.method import Method, at_least_one, fraction

Coupling = Literal["gumbel", "argmax"]


@dataclass(frozen=True, kw_only=True)
class APD(Method):
    """Keep the leading tokens on which diffusion marginals and their product with a verifier agree.

    Algorithm 1 of "Accelerating Diffusion LLMs via Adaptive Parallel Decoding" (Israel et al.,
    2025). `ratio` weighs the diffusion model against the verifier in the target distribution: 1
    takes every proposal, 0 keeps what the verifier would say. The first proposal is always kept.
    `window` and `lookahead` are the paper's W (tokens whose keys are computed again) and M (masks
    shown). `coupling` draws the target with the noise of the proposal, as the paper has it, or
    takes its arg-max on raw logits, as the authors' code does.
    """

    roles = ("verifier",)
    bidirectional = True

    verifier: str
    ratio: float = 0.7
    window: int | None = 16
    lookahead: int | None = 100
    coupling: Coupling = "gumbel"

    def __post_init__(self) -> None:
        fraction(ratio=self.ratio)
        at_least_one(window=self.window, lookahead=self.lookahead)
        if self.coupling not in ("gumbel", "argmax"):
            raise ValueError(f"coupling must be 'gumbel' or 'argmax', not {self.coupling!r}")

    def decode(self, seq: Sequence) -> Decoding:
        """Propose all holes in one pass, check them in another, keep the leading agreement."""
        target = seq.sampling if self.coupling == "gumbel" else Sampling()
        start, ready, step, alive = 0, 0, 0, True  # ready: verifier slots that hold output
        while alive:
            n = len(seq)
            end = min(n + (self.lookahead or seq.max_tokens), seq.limit)
            guess = yield Forward(
                ids=seq.ids[start:] + [seq.mask_id] * (end - n),
                start=start,
                mask=FULL,
                predict=range(n, end),
                read=seq.read(step, keep=True),
            )
            kept = 1
            if end - n > 1:
                assert guess.logits is not None
                checked = yield Forward(
                    ids=(seq.ids + guess.tokens[:-1])[ready:],
                    start=ready,
                    predict=range(n + 1, end),
                    read=Mixture(
                        guess=guess.logits[1:], ratio=self.ratio, sampling=target, step=step
                    ),
                    model="verifier",
                )
                kept += agreement(guess.tokens[1:], checked.tokens)
                ready = min(n + kept, end - 1)
            start = 0 if self.window is None else max(n - self.window + 1, 0)
            step += 1
            alive = seq.commit(guess.tokens[:kept])


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
    def group(cls, reads: Many[Self], slots: Many[Many[int]], device: torch.device) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        choose = chooser([r.sampling for r in reads], [r.step for r in reads], slots, device)
        guess = torch.cat([read.guess for read in reads]) if len(reads) > 1 else reads[0].guess
        ratio = torch.cat([torch.full((len(r.guess), 1), r.ratio) for r in reads]).to(device)

        def read(logits: Tensor, rows: slice) -> Readout:
            vocab = min(guess.shape[-1], logits.shape[-1])
            mixed = torch.lerp(logits[:, :vocab].float(), guess[rows, :vocab].float(), ratio[rows])
            return Readout(choose(mixed, rows), {})

        return read
