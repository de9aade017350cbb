"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.decoding import Decoding, Forward, Kind, Prediction, Request, Step, Tree
from outpace.engine.cache import Table
from outpace.engine.feed import Feed
from outpace.engine.pairing import Pairing
from outpace.engine.runner import Runner
from outpace.methods import Method

Listener = Callable[[Request], None]
"""Called after every forward that committed tokens, and at the end."""


class DecodingError(RuntimeError):
    """A method failed on a request; names the method and where it was."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request, its method's generator, its memory, and what it waits for.

    Attributes:
        watched: whether its listener is called after every forward, or only where tokens came.
        runner: the model that it waits for; None while its method has the word.
        whole: the forward that its method asked for.
        feed: what of that has not run yet, since a long prefill runs in parts.
        features, seconds: what the parts that have run brought and took.
        turn: when it began to wait, among all that wait.
        began, ended: readings of `time.perf_counter`.
        over: whether all is done, its listener told; only then may another thread look at it.
    """

    request: Request
    method: Method
    pairing: Pairing
    listener: Listener | None = None
    watched: bool = False
    decoding: Decoding | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    runner: Runner | None = None
    whole: Feed | None = None
    feed: Feed | None = None
    features: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    turn: int = 0
    began: float = 0.0
    ended: float = 0.0
    error: Exception | None = None
    over: bool = False

    @property
    def done(self) -> bool:
        """Whether the request has ended, well or not."""
        return self.request.finish_reason is not None or self.error is not None

    def reserve(self) -> bool:
        """Reserve memory in all of its models, or in none."""
        slots = self.method.slots(len(self.request.prompt), self.request.max_tokens)
        for role, runner in self.pairing.runners.items():
            table = runner.reserve(slots)
            if table is None:
                self.release()
                return False
            self.tables[role] = table
        return True

    def release(self, *, scrub: bool = False) -> None:
        """Give its memory back; erased where what it holds may be no numbers."""
        for role, table in self.tables.items():
            self.pairing.runners[role].release(table, scrub=scrub)
        self.tables.clear()

    def advance(self, prediction: Prediction | None) -> None:
        """Give the word to its method, up to the next forward."""
        self.runner = None
        if self.decoding is None:
            self.decoding = self.method.decode(self.request)
        forward = self.decoding.send(prediction)  # type: ignore[arg-type]  # None begins
        self.features = []  # of another forward: its own come part by part, even after Ctrl-C
        self.whole = self.feed = self.feed_of(forward)
        self.runner = self.pairing.runners[forward.model]

    def close(self) -> None:
        """Take the word from its method for good."""
        try:
            if self.decoding is not None:
                self.decoding.close()
        except Exception as error:
            self.error = self.error or self.failure(error)

    def feed_of(self, forward: Forward) -> Feed:
        """A forward, checked; `ValueError` for what its model cannot run."""
        if forward.model not in self.tables:
            raise ValueError(f"there is no {forward.model!r}; roles are {', '.join(self.tables)}")
        config = self.pairing.runners[forward.model].config
        own = self.request.processors
        return Feed.of(
            forward,
            self.tables[forward.model],
            config,
            layers=() if forward.features_for is None else self.layers(forward),
            processors=self.pairing.processors[forward.model] + own,
            text=forward.known(self.request.canvas or self.request.ids) if own else (),
        )

    def layers(self, forward: Forward) -> tuple[int, ...]:
        """Layers whose hidden states a forward wants, for the draft that reads them."""
        reader = self.pairing.runners.get(str(forward.features_for))
        if reader is None or not reader.config.feature_layers:
            raise ValueError(f"{forward.features_for} is no draft that reads features")
        own = self.pairing.runners[forward.model].config
        if own.kind is Kind.EXTENDING and forward.model == forward.features_for:
            return (own.layers - 1,)
        if own.feature_layers:
            raise ValueError(
                f"{forward.model} is a draft, which has no features to give to "
                f"{forward.features_for}"
            )
        return reader.config.feature_layers

    def spare(self, runner: Runner) -> Feed:
        """What it still has to feed, without what is found to be there."""
        assert self.feed is not None
        draft = self.feed.features_for
        found = None if draft is None else (self.pairing.runners[draft], self.tables[draft])
        self.feed = runner.spare(self.feed, found)
        return self.feed

    def put_by(self, rest: Feed, prediction: Prediction) -> None:
        """Keep what a part of its forward brought, until the rest has run."""
        brought = [] if prediction.features is None else [prediction.features]
        self.feed, self.features = rest, self.features + brought

    def joined(self, prediction: Prediction) -> Prediction:
        """A prediction with the hidden states of all parts of its forward."""
        if prediction.features is not None and self.features:
            prediction.features = torch.cat((*self.features, prediction.features))
        return prediction

    def note(self, whole: Feed, before: int, dial: int | None) -> int:
        """Add a forward of a cycle to the trace; how many tokens it brought to those before."""
        request = self.request
        kept = len(request.ids) - before
        request.trace.append(
            Step(
                model=whole.model,
                start=whole.start,
                rows=len(whole.ids),
                seen=whole.seen,
                kept=kept,
                seconds=self.seconds,
                pattern="tree" if isinstance(whole.pattern, Tree) else whole.pattern,
                holes=whole.holes(request.target.mask_id, before),
                dial=dial,
            )
        )
        self.seconds = 0.0
        return kept

    def failure(self, error: BaseException) -> DecodingError:
        """What its method ran into, and where."""
        what = str(error) or type(error).__name__
        wrapped = DecodingError(f"{self.method!r} failed at slot {len(self.request)}: {what}")
        wrapped.__cause__ = error
        return wrapped


def lost(error: BaseException) -> bool:
    """Whether a device can do nothing more, so that nothing there can be erased."""
    return isinstance(error.__cause__, torch.AcceleratorError)
