"""A request's tokens, limits and trace; the only place where a token becomes output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from outpace.decoding.forward import CAUSAL, Mask
from outpace.decoding.order import Order
from outpace.decoding.pace import Pace
from outpace.decoding.sampling import Sample, Sampling, Score

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True, frozen=True)
class Step:
    """One forward of one sequence, as the engine saw it.

    Attributes:
        model: role of the model that ran.
        start: slot of the first row.
        rows: number of rows fed.
        seen: number of slots that the last row saw.
        kept: number of tokens that were committed on what came back.
        seconds: wall time of the pass, shared by everyone in the batch.
        mask: what the rows saw of each other.
        holes: runs of slots that were fed as masks.
    """

    model: str
    start: int
    rows: int
    seen: int
    kept: int
    seconds: float
    mask: Mask = CAUSAL
    holes: tuple[range, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Native:
    """How the authors of a diffusion model decode it: what holds unless a method says otherwise.

    Attributes:
        order: which holes are filled next.
        block: tokens of a block; the whole canvas by default.
        eps: last time of the schedule `timesteps`; 0 for the schedule `even`.
        drawn: whether holes are scored by the law that tokens are drawn from, or by raw logits.
        null_prompt: whether the model was trained to go on from a prompt of masks.
    """

    order: Order = "confidence"
    block: int | None = None
    eps: float = 0.0
    drawn: bool = False
    null_prompt: bool = False


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Prompt, committed tokens, limits and trace of one request.

    Of its target it knows `shift`, the `padding` that stands behind an answer, and what is
    `native` to it; `mask_id` and `block` are the mask and the trained block length of the model
    that has them; `pace` is what requests of the same method share.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    mask_id: int = -1
    block: int = 1
    shift: int = 1
    padding: tuple[int, ...] = ()
    native: Native = Native()
    pace: Pace = field(default_factory=Pace)
    finish_reason: FinishReason | None = None
    trace: list[Step] = field(default_factory=list)
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def limit(self) -> int:
        """First slot that no token of this request may take."""
        return len(self.prompt) + self.max_tokens

    @property
    def tokens(self) -> list[int]:
        """Committed output, without prompt and end-of-sequence."""
        return self.ids[len(self.prompt) :]

    def commit(self, tokens: Iterable[int]) -> bool:
        """Make tokens output, up to an end-of-sequence or the limit; False once it has ended."""
        for token in tokens:
            if self.finish_reason is not None:
                break
            if token in self.eos:
                self.finish_reason = "stop"
                break
            self.ids.append(token)
            if len(self.ids) == self.limit:
                self.finish_reason = "length"
        return self.finish_reason is None

    def read(
        self,
        step: int = 0,
        *,
        keep: bool = False,
        scores: tuple[Score, ...] = (),
        drawn: bool = False,
    ) -> Sample:
        """The request's own sampling, with the noise of a step."""
        return Sample(sampling=self.sampling, step=step, keep=keep, scores=scores, drawn=drawn)
