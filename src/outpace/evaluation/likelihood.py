"""Methods that say nothing of their own: they read how probable a model finds a given text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Self

import torch
from torch import Tensor

from outpace.decoding import CAUSAL_KINDS, FULL, Decoding, Forward, Kind, Read, Request
from outpace.decoding.likeliest import likeliest
from outpace.decoding.sampling import Reader, Readout, Score
from outpace.methods import Method
from outpace.methods.bounds import at_least_one


@dataclass(frozen=True, kw_only=True)
class Given(Read):
    """The most probable tokens, and the log-probabilities of others that are given."""

    tokens: Sequence[int]
    scores: tuple[Score, ...] = ("logprob",)

    @classmethod
    def group(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        given = torch.tensor([token for read in reads for token in read.tokens], device=device)

        def read(logits: Tensor, rows: slice) -> Readout:
            logprobs = logits.float().log_softmax(-1).gather(-1, given[rows, None]).squeeze(-1)
            return Readout(likeliest(logits), {"logprob": logprobs})

        return read


@dataclass(slots=True)
class Found:
    """Log-likelihood of a text, and whether each of its tokens is the most probable one."""

    logprob: float = 0.0
    greedy: bool = True


@dataclass(frozen=True, kw_only=True)
class Likelihood(Method):
    """log p of what stands behind the first `known` tokens of the prompt, in one forward."""

    decodes = CAUSAL_KINDS

    known: int
    found: Found = field(default_factory=Found)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(known=self.known)

    def slots(self, prompt: int, max_tokens: int) -> int:
        """The last token is predicted, and not fed."""
        return max(prompt - 1, 1)

    def decode(self, request: Request) -> Decoding:
        """Feed the text, read its end."""
        text = request.prompt[self.known :]
        if text:
            out = yield Forward(
                ids=request.prompt[:-1],
                start=0,
                predict=range(self.known, len(request.prompt)),
                read=Given(tokens=text),
            )
            self.found.logprob = float(sum(out.logprobs or ()))
            self.found.greedy = out.tokens == text
        request.commit([0])


@dataclass(frozen=True, kw_only=True)
class MonteCarloLikelihood(Method):
    """A lower bound of log p of what stands behind the first `known` tokens, from random masks.

    LLaDA's estimate (Nie et al., 2025, equation 6): of L tokens a uniform number l is masked, and
    the log-probabilities of those are weighted by L / l. Numbers of masks are spread evenly over
    the `draws`, as the authors spread them. No order of decoding is given, so that the text is
    never said to be the greedy one.
    """

    decodes = (Kind.DIFFUSION,)

    known: int
    draws: int = 128
    seed: int = 0
    found: Found = field(default_factory=Found)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(known=self.known, draws=self.draws)

    def decode(self, request: Request) -> Decoding:
        """Mask, feed the whole text, read what is masked; again and again."""
        length = len(request.prompt) - self.known
        self.found.greedy = length == 0
        for masked in self.masks(length) if length else ():
            ids = list(request.prompt)
            for slot in masked:
                ids[slot] = request.target.mask_id
            out = yield Forward(
                ids=ids,
                start=0,
                pattern=FULL,
                predict=masked,
                read=Given(tokens=[request.prompt[slot] for slot in masked]),
            )
            weight = length / len(masked) / self.draws
            self.found.logprob += weight * float(sum(out.logprobs or ()))
        request.commit([0])

    def masks(self, length: int) -> Iterator[list[int]]:
        """Slots that are masked in each draw, in order."""
        random = Random(self.seed)
        first = random.randint(1, length)
        for draw in range(self.draws):
            count = (first - 1 + draw * length // self.draws) % length + 1
            yield [self.known + slot for slot in sorted(random.sample(range(length), count))]
