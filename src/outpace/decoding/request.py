"""A request's tokens, limits and trace; tokens become output only in `Request.commit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal, Protocol

from torch import Tensor

from outpace.decoding.draft_length import Pace
from outpace.decoding.processor import Processor, TokenLogprob
from outpace.decoding.sampling import Joint, JointRows, Sample, Score
from outpace.decoding.sampling_params import Sampling
from outpace.decoding.target import Target


class SharedAnswers(Protocol):
    """Answers of earlier requests to a model, all of them from one thread at a time."""

    def add_answer(self, ids: Sequence[int]) -> None:
        """Add the tokens of an answer."""

    def find_copy(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the end of a text elsewhere."""


class Constraint(Protocol):
    """Constraint on the answer of one request.

    It is also a `Processor`, which bans in each row the tokens that no valid answer has there.
    """

    def __call__(self, logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        """Ban tokens in `logits f32[r, V]`, row by row, as a `Processor` does."""
        ...

    @staticmethod
    def choose_jointly(asked: Sequence[JointRows], logits: Tensor, tokens: Tensor) -> None:
        """Change `tokens [r]` so that those of each read are part of one valid answer.

        They were chosen row by row from `logits f32[r, V]`, to which bans are already applied.
        """
        ...

    def forced_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow a prefix, while there is only one candidate.

        The list may be incomplete, and never has an end-of-sequence.
        """
        ...

    def check(self, request: Request) -> None:
        """Raise `ValueError` where the committed text is not a prefix of a valid answer.

        At the limit, a complete answer sets the finish reason "stop".
        """
        ...


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Step:
    """Trace entry: one forward of one sequence."""

    model: str
    """Role of the model that ran."""
    start: int
    rows: int
    visible: int
    """Number of slots that the last row attended to."""
    committed: int
    """Number of tokens committed from its prediction."""
    seconds: float
    """Wall time of the pass, shared by all requests of the batch."""
    pattern: Literal["causal", "full", "tree"] | tuple[int, ...] = "causal"
    """Attention pattern of the rows; "tree" for any tree."""
    holes: tuple[range, ...] = ()
    """Runs of slots that were masks."""
    draft_length: int | None = None
    """Tokens that the cycle of this forward was to propose, where a `Pace` decided."""
    drafted: int = 0
    """Number of draft tokens that this forward verified."""
    accepted: int = 0
    """Number of these drafts that were committed."""
    cached: int = field(default=0, compare=False)
    """Number of leading rows that did not run, since the prefix cache had them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Prompt, committed tokens, limits and trace of one request."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    """End-of-sequence tokens of the model, which a method may look for anywhere in a canvas."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer when committed. Methods must not use them, since the tokens before
    one must not depend on it."""
    min_tokens: int = 0
    """Among the first `min_tokens`, a token of `stop_ids` is part of the answer."""
    target: Target = Target()
    """Properties of the target model that methods may use."""
    logprobs: bool = False
    """Whether the log-probability of each token is wanted; they are stored in `scores`."""
    top_logprobs: int = 0
    """Number of most probable tokens that each log-probability has, see `TokenLogprob`."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens wanted with the log-probability of each token of the prompt;
    None if these are not wanted."""
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens after the first, once computed."""
    choices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens of each text whose log-probability after the prompt is wanted."""
    choice_scores: dict[str, float] = field(default_factory=dict)
    """Log-probabilities of `choices`, once computed."""
    processors: tuple[Processor, ...] = ()
    """Logits processors, applied before the logits are read."""
    canvas: Sequence[int] = ()
    """Working text of an out-of-order method, slot by slot, for progress reports; holes are the
    mask."""
    constraint: Constraint | None = None
    fixed_tokens: Mapping[int, int] = field(default_factory=dict)
    """Tokens of the answer that are fixed in advance, by slot."""
    is_infill: bool = False
    """Whether every slot up to the limit is to be filled, as in an infill template."""
    shared_answers: SharedAnswers | None = None
    """Answers of earlier requests to the same models."""
    pace: Pace | None = None
    """Controller of the draft length, shared by all requests of the method; None where the options
    fix it."""
    finish_reason: FinishReason | None = None
    """Why the request ended; None while it runs."""
    trace: list[Step] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    cycle_length: int | None = field(default=None, init=False)
    """Tokens that the present cycle proposes under `pace`."""
    cycle_start: int = field(default=0, init=False)
    """Slots before the present cycle."""
    end_token: int = field(default=-1, init=False)
    """The end-of-sequence or stop id that ended it; -1 without one."""
    ids: list[int] = field(init=False)
    """Prompt and committed tokens."""

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

    def lookahead_ids(self, end: int) -> list[int]:
        """Return masks, or fixed tokens, for the uncommitted slots up to slot `end`."""
        slots, mask = range(len(self.ids), end), self.target.mask_id
        if not self.fixed_tokens:
            return [mask] * len(slots)
        return [self.fixed_tokens.get(slot, mask) for slot in slots]

    def commit(self, tokens: Iterable[int], logprobs: Iterable[float] | None = None) -> bool:
        """Make tokens output, up to an end-of-sequence, a stop id or the limit.

        Fixed tokens that follow are committed as well.

        Args:
            tokens: next tokens of the answer.
            logprobs: one entry per token; further entries are ignored.

        Returns:
            False once the request has ended.

        Raises:
            ValueError: the constraint does not allow the tokens.
        """
        scores = repeat(None) if logprobs is None else logprobs
        for token, score in zip(tokens, scores, strict=False):
            if self.finish_reason is not None:
                break
            if self.is_end(token):
                self.finish_reason, self.end_token = "stop", token
                break
            self.append_token(token, score)
        while self.finish_reason is None and (slot := len(self.ids)) in self.fixed_tokens:
            self.append_token(self.fixed_tokens[slot], 0.0 if self.logprobs else None)
        if self.constraint is not None:
            self.constraint.check(self)
        if self.finish_reason is not None:
            self.report_cycle()
        return self.finish_reason is None

    def is_end(self, token: int) -> bool:
        if token in self.eos:
            return True
        return token in self.stop_ids and len(self.ids) >= len(self.prompt) + self.min_tokens

    def append_token(self, token: int, score: float | None) -> None:
        """Append a token to the output; stop at the limit."""
        self.ids.append(token)
        if score is not None:
            self.scores.append(score)
        if len(self.ids) == self.limit:
            self.finish_reason = "length"

    def choose_length(self, max_length: int, unread: int = 0, lost: int = 0) -> int:
        """Return the number of tokens that the next cycle proposes.

        Args:
            max_length: upper bound; the result without a `pace`.
            unread: slots that the draft has not read yet.
            lost: those of them that the target has to read again for the draft.
        """
        if self.pace is None:
            return max_length
        if self.is_paused:
            return 1
        self.report_cycle()
        value = self.pace.choose_length(self, unread, self.limit - len(self.ids), lost)
        self.cycle_length, self.cycle_start = min(max_length, value), len(self.ids)
        return self.cycle_length

    def skips_drafting(self, unread: int) -> bool:
        """Return whether drafting is off for a while; the draft has not read `unread` slots."""
        if self.pace is None:
            return False
        return self.is_paused or self.pace.skips_drafting(unread, self.limit - len(self.ids))

    @property
    def is_paused(self) -> bool:
        """Whether drafting is paused until the controller reviews its decision."""
        return (
            self.cycle_length == 1
            and self.pace is not None
            and self.pace.cycles < self.pace.paused_until
        )

    def report_cycle(self) -> None:
        """Report the tokens accepted in the present cycle to the controller.

        An end-of-sequence or a stop id is no output, but counts as an accepted token.
        """
        if self.pace is not None and self.cycle_length is not None:
            accepted = len(self.ids) - self.cycle_start + (self.finish_reason == "stop")
            self.pace.record_cycle(self.cycle_length, accepted)
            self.cycle_length = None

    @property
    def joint_text(self) -> Joint | None:
        """Constraint and canvas for a joint choice of several holes; None if unconstrained."""
        if self.constraint is None:
            return None
        return Joint(self.constraint, list(self.canvas or self.ids))

    @property
    def forced_tokens(self) -> list[int]:
        """Next tokens that the constraint leaves no alternative to."""
        return [] if self.constraint is None else self.constraint.forced_tokens(self.ids)

    def sample(
        self,
        step: int = 0,
        *,
        keep: bool = False,
        scores: tuple[Score, ...] = (),
        score_as_drawn: bool = False,
        joint: bool = False,
    ) -> Sample:
        """Return a read with the request's sampling options and the noise of a step.

        Args:
            step: number of the step, which selects the noise.
            keep: whether the raw logits stay available in the prediction.
            scores: scores that the method needs.
            score_as_drawn: whether scores use the sampling distribution instead of the raw logits.
            joint: whether the tokens of several holes must satisfy the constraint together.
        """
        if self.logprobs:
            scores = (*scores, "logprob")
        return Sample(
            sampling=self.sampling,
            step=step,
            keep=keep,
            scores=scores,
            score_as_drawn=score_as_drawn,
            joint=self.joint_text if joint else None,
        )
