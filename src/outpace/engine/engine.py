"""Many sequences, one ragged pass: who waits for which model, and who goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from outpace.decoding import Decoding, Forward, Native, Pace, Prediction, Sampling, Step
from outpace.decoding import Sequence as Request
from outpace.engine.admission import check_request
from outpace.engine.cache import Table
from outpace.engine.cut import cut_at, halves
from outpace.engine.prefix import Saved
from outpace.engine.runner import Runner
from outpace.methods import Method
from outpace.models.config import DraftConfig
from outpace.models.families import FAMILIES


class DecodingError(RuntimeError):
    """A method failed on a request; names the method and where it was."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its way: its method's generator, its memory, and the forward it waits for.

    `forward` is what is left of `whole`, of which a long prefill may have run in part;
    `features` and `seconds` are what that brought and took; a draft has found the first `spared`
    slots filled, whose features nobody has computed. `began` and `ended` are readings of
    `time.perf_counter`.
    """

    seq: Request
    method: Method
    runners: Mapping[str, Runner]
    listener: Callable[[Request], None] | None = None
    decoding: Decoding | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    forward: Forward | None = None
    whole: Forward | None = None
    features: list[Tensor] = field(default_factory=list)
    spared: int = 0
    seconds: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended, well or not."""
        return self.seq.finish_reason is not None or self.error is not None

    def layers(self, forward: Forward) -> tuple[int, ...]:
        """Layers whose hidden states a forward wants, for the draft that reads them."""
        if forward.features is None:
            return ()
        config = self.runners[forward.features].config
        if not isinstance(config, DraftConfig):
            raise ValueError(f"{forward.features} is no draft that reads features")
        if isinstance(self.runners[forward.model].config, DraftConfig):
            raise ValueError(f"{forward.model} is a draft, which has no features to give")
        return config.feature_layers


class Engine:
    """Runs requests of any methods together: drafts first, the target last.

    `max_rows` bounds the rows of a pass (a longer causal prefill is cut, which no method
    notices), `max_sequences` the requests that run at a time; others queue in order.
    """

    def __init__(self, *, max_rows: int = 2048, max_sequences: int = 256) -> None:
        if max_rows < 1 or max_sequences < 1:
            raise ValueError(
                f"max_rows and max_sequences must be at least 1, not {max_rows} and {max_sequences}"
            )
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.runners: list[Runner] = []
        self.waiting: dict[str, deque[Job]] = {}
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.paces: dict[tuple[Method | str, ...], Pace] = {}

    def add(self, runner: Runner) -> None:
        """Add a model; the first one added runs last in every turn."""
        self.runners.insert(0, runner)
        self.waiting[runner.name] = deque()

    def submit(
        self,
        method: Method,
        prompt: Sequence[int],
        *,
        runners: Mapping[str, Runner],
        max_tokens: int,
        sampling: Sampling | None = None,
        eos: frozenset[int] | None = None,
        listener: Callable[[Request], None] | None = None,
    ) -> Job:
        """Queue a request; `runners` gives the model of each role.

        `listener` is called after every forward that committed tokens and at the end. Raises
        `ValueError` for a request that could never run.
        """
        target = runners["target"].config
        configs = [runner.config for runner in runners.values()]
        masks = [each.mask_id for each in configs if each.bidirectional] + [target.mask_id]
        blocks = [each.block for each in configs if isinstance(each, DraftConfig)]
        seq = Request(
            prompt=list(prompt),
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
            eos=frozenset(target.eos) if eos is None else eos,
            mask_id=next((mask for mask in masks if mask is not None), -1),
            block=next(iter(blocks), 1),
            shift=target.shift,
            padding=target.eos[:1],
            native=Native(**FAMILIES[target.family].native),
        )
        if method.adaptive:
            names = (runner.name for runner in runners.values())
            seq.pace = self.paces.setdefault((method, *names), seq.pace)
        check_request(method, seq, runners)
        job = Job(seq=seq, method=method, runners=runners, listener=listener)
        self.queue.append(job)
        return job

    def step(self) -> bool:
        """One pass of the first model anyone waits for, over all who wait for it.

        False where nothing is left to do.
        """
        self.admit()
        runner = next((r for r in self.runners if self.waiting[r.name]), None)
        if runner is None:
            return False
        # A listener that hears of one request's end may cancel another.
        work = [(job, forward) for job, forward in self.take(runner) if not job.done]
        if not work:
            return True
        began = time.perf_counter()
        forwards = [forward for _, forward in work]
        tables = [job.tables[forward.model] for job, forward in work]
        try:
            layers = [job.layers(forward) for job, forward in work]
            predictions = runner.run(forwards, tables, layers)
        except Exception as error:
            for job, _ in work:
                if not job.done:
                    self.fail(job, error)
            return True
        seconds = time.perf_counter() - began
        self.time(work, seconds)
        self.learn(runner, work)
        for (job, forward), prediction in zip(work, predictions, strict=True):
            job.seconds += seconds
            if prediction.features is not None:
                job.features.append(prediction.features)
            # A listener may have cancelled it meanwhile.
            if forward is job.forward and not job.done:
                self.resume(job, prediction)
        return True

    @staticmethod
    def time(work: Sequence[tuple[Job, Forward]], seconds: float) -> None:
        """Tell all who adapt to it what a pass took."""
        if adaptive := [(job, forward) for job, forward in work if job.method.adaptive]:
            rows = sum(len(forward.ids) for _, forward in work)
            told = {(id(job.seq.pace), forward.model): job.seq.pace for job, forward in adaptive}
            for (_, model), pace in told.items():
                pace.passed(model, len(work), rows, seconds)

    @staticmethod
    def learn(runner: Runner, work: Sequence[tuple[Job, Forward]]) -> None:
        """Let a model find again what it has just computed."""
        if runner.prefix is None:
            return
        for job, forward in work:
            table = job.tables[forward.model]
            if forward.context is None:
                runner.prefix.learn(table, forward.start, runner.prefix.text(forward))
            else:
                text = job.seq.ids[forward.first : forward.start]
                runner.prefix.learn(table, forward.first, text)

    @property
    def saved(self) -> Saved:
        """What the prefix caches of all models have spared so far."""
        found = [runner.prefix.saved for runner in self.runners if runner.prefix is not None]
        return Saved(*map(sum, zip(*found, strict=True))) if found else Saved()

    def cancel(self, job: Job) -> None:
        """End a request where it is; its pages are free at once."""
        if job.done:
            return
        job.seq.finish_reason = "cancelled"
        if job.decoding is None:
            self.queue.remove(job)
            self.tell(job)
            return
        self.withdraw(job)
        self.finish(job)

    def admit(self) -> None:
        """Let requests in, in order, while their slots can be reserved in every model."""
        while self.queue and len(self.running) < self.max_sequences:
            job = self.queue[0]
            if not self.reserve(job):
                return
            self.queue.popleft()
            self.running.append(job)
            job.began = time.perf_counter()
            job.decoding = job.method.decode(job.seq)
            self.advance(job, None)
            if job.done:
                self.finish(job)

    def reserve(self, job: Job) -> bool:
        """Reserve the slots of a request in all of its models, or in none."""
        slots = job.method.slots(len(job.seq.prompt), job.seq.max_tokens)
        for role, runner in job.runners.items():
            table = runner.cache.reserve(slots)
            if table is None:
                self.release(job)
                return False
            job.tables[role] = table
        return True

    def release(self, job: Job) -> None:
        """Free the slots of a request."""
        for role, table in job.tables.items():
            job.runners[role].cache.release(table)
        job.tables.clear()

    def take(self, runner: Runner) -> list[tuple[Job, Forward]]:
        """Forwards for the next pass, in order of waiting, up to `max_rows` rows.

        A long causal forward is cut; what is left of it waits behind the others.
        """
        waiting = self.waiting[runner.name]
        work: list[tuple[Job, Forward]] = []
        room = self.max_rows
        while waiting and room > 0:
            job = waiting[0]
            if not self.spare(job, runner):
                continue
            assert job.forward is not None
            fits = job.forward.end - job.forward.first <= room
            cut = 0 if fits else cut_at(job.forward, room, runner.config.shift)
            if cut:
                head, job.forward = halves(job.forward, cut)
                work.append((job, head))
                waiting.rotate(-1)
                break
            if not fits and work:
                break
            work.append((waiting.popleft(), job.forward))
            room -= job.forward.end - job.forward.first
        return work

    def spare(self, job: Job, runner: Runner) -> bool:
        """Take away the rows of a forward whose slots are found filled; False where that failed."""
        forward = job.forward
        assert forward is not None
        if runner.prefix is None:
            return True
        table = job.tables[forward.model]
        try:
            if forward.context is not None and forward.first < job.spared:
                rest = forward.context[job.spared - forward.first :]
                job.forward = forward = replace(forward, context=rest)
            elif len(forward.ids) > 1:
                unread = cut_at(forward, len(forward.ids), runner.config.shift)
                if cut := self.skip(job, forward, unread):
                    job.forward = forward = halves(forward, cut)[1]
            runner.prefix.writes(table, forward.first, forward.end)
        except ValueError as error:
            self.fail(job, error)
            return False
        return True

    @staticmethod
    def skip(job: Job, forward: Forward, unread: int) -> int:
        """How many of the first `unread` rows are found; no more than a draft knows features of."""
        prefix, table = job.runners[forward.model].prefix, job.tables[forward.model]
        assert prefix is not None
        start, text = forward.start, prefix.text(forward)
        if forward.features is None:
            return prefix.skip(table, start, text, unread)
        draft, drafts = job.runners[forward.features], job.tables[forward.features]
        if draft.prefix is None:
            return 0
        cut = prefix.skip(table, start, text, min(unread, draft.prefix.found(drafts, start, text)))
        if cut:
            assert isinstance(draft.config, DraftConfig)
            draft.prefix.skip(drafts, start, text, cut)
            job.spared = start + cut
            job.features.append(draft.model.embedding.weight.new_zeros(cut, draft.config.features))
        return cut

    def resume(self, job: Job, prediction: Prediction) -> None:
        """Give a method what it waited for, and note the step that it made of it."""
        whole, before = job.whole, len(job.seq)
        assert whole is not None
        # Read before the method goes on: it may have fed the sequence's own list, which grows.
        step = partial(
            Step,
            model=whole.model,
            start=whole.start,
            rows=len(whole.ids),
            seen=whole.seen,
            seconds=job.seconds,
            mask=whole.mask,
            holes=whole.holes(job.seq.mask_id, before),
        )
        job.seconds = 0.0
        if len(job.features) > 1:
            prediction.features = torch.cat(job.features)
        job.features.clear()
        self.advance(job, prediction)
        kept = len(job.seq) - before
        job.seq.trace.append(step(kept=kept))
        if job.done:
            self.finish(job)
        elif kept:
            self.tell(job)

    def advance(self, job: Job, prediction: Prediction | None) -> None:
        """Run a method to its next forward and queue that; an error ends this request alone."""
        assert job.decoding is not None
        try:
            forward = next(job.decoding) if prediction is None else job.decoding.send(prediction)
            table = job.tables[forward.model]
            config = job.runners[forward.model].config
            forward.check(
                vocab=config.vocab,
                length=config.max_length,
                slots=table.size,
                written=table.written,
                features=config.features if isinstance(config, DraftConfig) else 0,
            )
            forward.predicted_rows(config.shift)
            job.layers(forward)
        except StopIteration:
            if job.seq.finish_reason is None:
                job.error = DecodingError(f"{job.method!r} returned before the request had ended")
            return
        except Exception as error:
            job.error = failure(job, error)
            return
        if job.done:
            return
        job.forward = job.whole = forward
        self.waiting[job.runners[forward.model].name].append(job)

    def fail(self, job: Job, error: Exception) -> None:
        """End a request whose forward could not be run."""
        job.error = failure(job, error)
        self.withdraw(job)
        self.finish(job)

    def withdraw(self, job: Job) -> None:
        """Let a request wait for no model."""
        assert job.forward is not None
        waiting = self.waiting[job.runners[job.forward.model].name]
        if job in waiting:
            waiting.remove(job)

    def finish(self, job: Job) -> None:
        """Close a request's method and give its pages back."""
        assert job.decoding is not None
        job.decoding.close()
        job.ended = time.perf_counter()
        self.running.remove(job)
        self.release(job)
        self.tell(job)

    @staticmethod
    def tell(job: Job) -> None:
        """Call the listener of a request."""
        if job.listener is not None:
            job.listener(job.seq)


def failure(job: Job, error: Exception) -> DecodingError:
    """What a request's method ran into, and where."""
    wrapped = DecodingError(f"{job.method!r} failed at slot {len(job.seq)}: {error}")
    wrapped.__cause__ = error
    return wrapped
