"""A request's tokens, limits and trace; the only place where a token becomes output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

from outpace.decoding.dial import Pace
from outpace.decoding.joint import Constraint, Joint
from outpace.decoding.processor import Processor
from outpace.decoding.sampling import Sample, Score
from outpace.decoding.sampling_params import Sampling
from outpace.decoding.target import Target

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Step:
    """One forward of one sequence, as the engine saw it.

    Attributes:
        model: role of the model that ran.
        start: slot of the first row.
        rows: number of rows fed.
        seen: number of slots that the last row saw.
        kept: number of tokens that were committed on what came back.
        seconds: wall time of the pass, shared by everyone in the batch.
        pattern: what the rows saw of each other; of a tree, that it was one.
        holes: runs of slots that were fed as masks.
        dial: tokens that the cycle of this forward was to propose, where a `Pace` decided.
    """

    model: str
    start: int
    rows: int
    seen: int
    kept: int
    seconds: float
    pattern: Literal["causal", "full", "tree"] | tuple[int, ...] = "causal"
    holes: tuple[range, ...] = ()
    dial: int | None = None


@dataclass(slots=True, kw_only=True)
class Request:
    """Prompt, committed tokens, limits and trace of what a user asks for.

    Attributes:
        eos: end-of-sequence of the model, which a method may look for anywhere in a canvas.
        stop_ids: tokens that end the answer when they are committed. Methods must not use them, so
            that the tokens before one are the same without it.
        min_tokens: a token of `stop_ids` is a token of the answer among the first `min_tokens`.
        target: what it may know of the model that answers.
        logprobs: whether the log-probability of each token is wanted; they come to `scores`.
        processors: what changes the logits of its rows before they are read.
        canvas: what a method that fills out of order has so far, slot by slot, for those who watch;
            holes are the mask.
        constraint: what the answer must be as a whole.
        given: tokens that stand in slots of the answer from the beginning.
        cloze: whether every slot up to the limit is to be filled, as in a text with holes.
        pace: what decides, for all requests of its method, how parallel to be; None where the
            options do.
        dialled, since: tokens that the present cycle proposes by it, and slots before that.
        finish_reason: why it has ended; None while it goes on.
        ids: prompt and committed tokens.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    target: Target = Target()
    logprobs: bool = False
    processors: tuple[Processor, ...] = ()
    canvas: Sequence[int] = ()
    constraint: Constraint | None = None
    given: Mapping[int, int] = field(default_factory=dict)
    cloze: bool = False
    pace: Pace | None = None
    finish_reason: FinishReason | None = None
    trace: list[Step] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    dialled: int | None = field(default=None, init=False)
    since: int = field(default=0, init=False)
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

    def ahead(self, end: int) -> list[int]:
        """What is shown from the first slot that is not committed up to slot `end`.

        Masks, and tokens that are given.
        """
        slots, mask = range(len(self.ids), end), self.target.mask_id
        if not self.given:
            return [mask] * len(slots)
        return [self.given.get(slot, mask) for slot in slots]

    def commit(self, tokens: Iterable[int], logprobs: Iterable[float] | None = None) -> bool:
        """Make tokens output, up to an end-of-sequence, a stop id or the limit.

        Returns False once the request has ended.

        Tokens that are given behind them become output as well. `logprobs` has an entry for each
        token, and may have more. Raises `ValueError` for tokens that are no part of an answer as it
        is constrained.
        """
        scores = repeat(None) if logprobs is None else logprobs
        for token, score in zip(tokens, scores, strict=False):
            if self.finish_reason is not None:
                break
            if self.is_end(token):
                self.finish_reason = "stop"
                break
            self.append(token, score)
        while self.finish_reason is None and (slot := len(self.ids)) in self.given:
            self.append(self.given[slot], 0.0 if self.logprobs else None)
        if self.constraint is not None:
            self.constraint.check(self)
        if self.finish_reason is not None:
            self.account()
        return self.finish_reason is None

    def is_end(self, token: int) -> bool:
        """Whether the next token of the answer ends it, and is no part of it."""
        if token in self.eos:
            return True
        return token in self.stop_ids and len(self.ids) >= len(self.prompt) + self.min_tokens

    def append(self, token: int, score: float | None) -> None:
        """Make a token output."""
        self.ids.append(token)
        if score is not None:
            self.scores.append(score)
        if len(self.ids) == self.limit:
            self.finish_reason = "length"

    def dial(self, most: int, behind: int = 0, lost: int = 0) -> int:
        """Number of tokens that the next cycle proposes: `most`, or fewer where that pays.

        A draft has first to read `behind` slots, of which the target has to be fed `lost` again.
        """
        if self.pace is None:
            return most
        if self.resting:
            return 1
        self.account()
        value = self.pace.value(self, behind, self.limit - len(self.ids), lost)
        self.dialled, self.since = min(most, value), len(self.ids)
        return self.dialled

    def settled(self, behind: int) -> bool:
        """Whether no cycle is to propose anything for a while; its draft is `behind` slots late."""
        if self.pace is None:
            return False
        return self.resting or self.pace.settled(behind, self.limit - len(self.ids))

    @property
    def resting(self) -> bool:
        """Whether it proposed nothing, and its pace says that it need not ask again so soon."""
        return self.dialled == 1 and self.pace is not None and self.pace.cycles < self.pace.rest

    def account(self) -> None:
        """Tell the pace what the present cycle has brought.

        An end-of-sequence or a stop id is no output, but a token that was kept.
        """
        if self.pace is not None and self.dialled is not None:
            kept = len(self.ids) - self.since + (self.finish_reason == "stop")
            self.pace.brought(self.dialled, kept)
            self.dialled = None

    @property
    def joint(self) -> Joint | None:
        """What makes the tokens of several holes fit together, where the answer is constrained."""
        if self.constraint is None:
            return None
        return Joint(self.constraint, list(self.canvas or self.ids))

    @property
    def forced(self) -> list[int]:
        """Tokens that must come next, as its constraint allows no others."""
        return [] if self.constraint is None else self.constraint.forced(self.ids)

    def sample(
        self,
        step: int = 0,
        *,
        keep: bool = False,
        scores: tuple[Score, ...] = (),
        drawn: bool = False,
        joint: bool = False,
    ) -> Sample:
        """A read by the request's own sampling, with the noise of a step.

        `joint` is for holes of which several may be filled on one forward: their tokens then fit
        together, where the answer is constrained.
        """
        if self.logprobs:
            scores = (*scores, "logprob")
        return Sample(
            sampling=self.sampling,
            step=step,
            keep=keep,
            scores=scores,
            drawn=drawn,
            joint=self.joint if joint else None,
        )
