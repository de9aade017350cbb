"""`Job`: a request in the engine, with its method's generator and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.decoding import DRAFT_KINDS, Decoding, Forward, Kind, Prediction, Request, Step, Tree
from outpace.decoding.scoring import score_choices, score_prompt
from outpace.engine.cache import PageTable
from outpace.engine.pack import ScheduledForward
from outpace.engine.pairing import Pairing
from outpace.engine.runner import Runner
from outpace.methods import Method

Listener = Callable[[Request], None]
"""Called after every forward that committed tokens, and at the end."""


class DecodingError(RuntimeError):
    """A method failed on a request; the message names the method and the slot."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Request):
    """A request in the engine: its method's generator, its memory, the model that it waits for.

    Attributes:
        notify_always: whether the listener is called after every forward, or only after new tokens.
        runner: the model that it waits for; None while its method runs.
        full_forward: the forward that its method yielded.
        remaining_forward: the part of it that has not run yet, since a long prefill runs in parts.
        partial_features: hidden states of the parts that have run.
        seconds: time of the parts that have run.
        num_cached: number of its rows that the prefix cache held.
        prompt_read: number of tokens of the prompt that the target has read in parts.
        turn: order in which jobs wait for a pass.
        began, ended: readings of `time.perf_counter`.
        is_finished: whether everything is done, the last callback included. Only then may another
            thread read the job.
    """

    method: Method
    pairing: Pairing
    listener: Listener | None = None
    notify_always: bool = False
    decoding: Decoding | None = None
    tables: dict[str, PageTable] = field(default_factory=dict)
    runner: Runner | None = None
    full_forward: ScheduledForward | None = None
    remaining_forward: ScheduledForward | None = None
    partial_features: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    num_cached: int = 0
    prompt_read: int = 0
    turn: int = 0
    began: float = 0.0
    ended: float = 0.0
    error: Exception | None = None
    is_finished: bool = False

    def __post_init__(self) -> None:
        Request.__post_init__(self)  # `super()` fails in a dataclass with slots
        self.target, self.shared_answers = self.pairing.target, self.pairing.answers

    @property
    def has_ended(self) -> bool:
        """Whether the request has ended, with or without an error."""
        return self.finish_reason is not None or self.error is not None

    def reserve_memory(self) -> bool:
        """Reserve memory in each cache, or in none.

        Pages are taken as the text grows, unless the method cannot begin again where they are
        short: then all are reserved.
        """
        slots = self.method.slots_needed(len(self.prompt), self.max_tokens)
        text = self.ids if self.method.is_resumable else None
        for role, runner in self.pairing.runners.items():
            # Pages of a draft depend on the target's features, and so on its adapter.
            depends = role == "target" or runner.config.kind in DRAFT_KINDS
            table = runner.reserve(slots, self.pairing.adapter if depends else None, text)
            if table is None:
                self.release_memory()
                return False
            self.tables[role] = table
        return True

    def release_memory(self, *, zero: bool = False) -> None:
        """Free its memory; `zero` erases it where it may hold NaNs."""
        for role, table in self.tables.items():
            self.pairing.runners[role].release(table, zero=zero)
        self.tables.clear()

    @property
    def may_begin_again(self) -> bool:
        """Whether it would generate the same tokens after it has lost its memory."""
        return self.method.is_resumable or len(self.ids) == len(self.prompt)

    def reset_method(self) -> None:
        """Free its memory and its method, which begins again with the text so far."""
        self.close_method()
        self.runner = self.full_forward = self.remaining_forward = self.cycle_length = None
        self.partial_features, self.num_cached, self.canvas = [], 0, ()
        self.release_memory()

    def has_pages(self, runner: Runner) -> bool:
        """Return whether it holds pages of a model's cache, or may take some for certain."""
        return any(
            self.pairing.runners[role] is runner and (table.pages or table.promised)
            for role, table in self.tables.items()
        )

    def advance_method(self, prediction: Prediction | None) -> None:
        """Resume its method up to the next forward."""
        self.runner = None
        if self.decoding is None:
            self.decoding = self.method.decode(self)
            if self.choices:
                self.decoding = score_choices(self, self.decoding)
            if self.prompt_logprobs is not None:
                self.decoding = score_prompt(self, self.decoding)
        forward = self.decoding.send(prediction)  # type: ignore[arg-type]  # None begins
        self.partial_features = []  # those of the last forward, even after Ctrl-C
        self.full_forward = self.remaining_forward = self.schedule_forward(forward)
        self.runner = self.pairing.runners[forward.model]

    def close_method(self) -> None:
        decoding, self.decoding = self.decoding, None
        try:
            if decoding is not None:
                decoding.close()
        except Exception as error:
            self.error = self.error or self.wrap_error(error)

    def schedule_forward(self, forward: Forward) -> ScheduledForward:
        """Check a forward; raise `ValueError` where its model cannot run it."""
        if forward.model not in self.tables:
            raise ValueError(
                f"unknown role {forward.model!r}; the roles are {', '.join(self.tables)}"
            )
        model = self.pairing.runners[forward.model].model
        read = forward.read
        processors = () if read.is_given else self.processors
        top = self.top_logprobs if read.top_logprobs is None else read.top_logprobs
        canvas = self.canvas if forward.branches is None else ()  # branches follow the ids
        return ScheduledForward.from_forward(
            forward,
            self.tables[forward.model],
            model.config,
            positions=len(model.cos),
            layers=() if forward.features_for is None else self.feature_layers(forward),
            processors=self.pairing.processors[forward.model] + processors,
            top_logprobs=top,
            text=forward.merge_text(canvas or self.ids) if processors else (),
            settled=len(self.ids) - 1,
        )

    def feature_layers(self, forward: Forward) -> tuple[int, ...]:
        """Return the layers whose hidden states the draft of a forward reads."""
        reader = self.pairing.runners.get(str(forward.features_for))
        if reader is None or not reader.config.feature_layers:
            raise ValueError(
                f"features_for={forward.features_for!r} is not a draft that reads features"
            )
        config = self.pairing.runners[forward.model].config
        if config.kind is Kind.EAGLE and forward.model == forward.features_for:
            return (config.layers - 1,)
        if config.feature_layers:
            raise ValueError(
                f"{forward.model} is a draft, which has no features for {forward.features_for}"
            )
        return reader.config.feature_layers

    def apply_prefix_cache(self, runner: Runner) -> ScheduledForward:
        """Return its remaining forward without the rows that the prefix cache holds."""
        assert self.remaining_forward is not None
        draft = self.remaining_forward.features_for
        draft_memory = None if draft is None else (self.pairing.runners[draft], self.tables[draft])
        forward = runner.apply_prefix_cache(self.remaining_forward, draft_memory)
        self.num_cached += len(self.remaining_forward.ids) - len(forward.ids)
        self.remaining_forward = forward
        return forward

    def store_partial(self, rest: ScheduledForward, prediction: Prediction) -> None:
        """Store the features of a part of its forward until the rest has run."""
        if rest.model == "target":
            self.prompt_read = min(rest.start, len(self.prompt))
        features = [] if prediction.features is None else [prediction.features]
        self.remaining_forward, self.partial_features = rest, self.partial_features + features

    def join_features(self, prediction: Prediction) -> Prediction:
        """Return a prediction with the hidden states of all parts of its forward."""
        if prediction.features is not None and self.partial_features:
            prediction.features = torch.cat((*self.partial_features, prediction.features))
        return prediction

    def record_step(self, whole: ScheduledForward, before: int, draft_length: int | None) -> int:
        """Add a forward to the trace; return the number of tokens committed from it.

        Args:
            whole: the forward, with all of its parts.
            before: number of slots before it.
            draft_length: tokens that its cycle was to propose.
        """
        committed = len(self.ids) - before
        drafted = self.count_drafts(whole, before) if whole.end > before else 0
        self.trace.append(
            Step(
                model=whole.model,
                start=whole.start,
                rows=len(whole.ids),
                visible=whole.num_visible,
                committed=committed,
                seconds=self.seconds,
                pattern="tree" if isinstance(whole.pattern, Tree) else whole.pattern,
                holes=whole.mask_runs(self.target.mask_id, before),
                draft_length=draft_length,
                drafted=drafted,
                accepted=self.count_accepted(whole.model, drafted, before) if drafted else 0,
                cached=self.num_cached,
            )
        )
        self.seconds, self.num_cached = 0.0, 0
        return committed

    def count_accepted(self, model: str, drafted: int, before: int) -> int:
        """Return how many of the drafts are among the tokens committed after `before` slots."""
        # Before an end-of-sequence, the target's tokens are drafts; the verifier's follow another.
        has_end = self.finish_reason == "stop" and len(self.ids) < self.limit
        own = model == "verifier" or not has_end
        chosen = sum(slot not in self.fixed_tokens for slot in range(before, len(self.ids)))
        return max(min(drafted, chosen - own), 0)

    def count_drafts(self, whole: ScheduledForward, before: int) -> int:
        """Return the number of draft tokens that a forward verifies after `before` slots.

        A chain has no draft for the last slot before the limit, where the verifying model's own
        token follows the accepted ones in any case.
        """
        row = begin = before - whole.start
        if whole.model == "draft" or not self.method.is_sequential or begin < 0:
            return 0
        is_tree, positions = isinstance(whole.pattern, Tree), whole.positions
        while row < len(whole.ids) and whole.ids[row] != self.target.mask_id:
            if not is_tree and positions is not None and positions[row] != whole.start + row:
                break  # WeDLM's tokens after the first hole
            row += 1
        return row - begin if is_tree else max(min(row, self.limit - 1 - whole.start) - begin, 0)

    def wrap_error(self, error: BaseException) -> DecodingError:
        message = str(error) or type(error).__name__
        wrapped = DecodingError(f"{self.method!r} failed at slot {len(self)}: {message}")
        wrapped.__cause__ = error
        return wrapped


def is_device_lost(error: BaseException) -> bool:
    """Return whether the device failed for good, so that its memory cannot be erased."""
    return isinstance(error.__cause__, torch.AcceleratorError)
