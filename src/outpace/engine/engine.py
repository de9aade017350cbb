"""Many sequences, one ragged pass: who waits for which model, and who goes on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import Literal

import torch

from outpace.decoding import Constraint, Pace, Prediction, Processor, Request, Sampling
from outpace.decoding.sampling import is_whole
from outpace.engine.feed import Feed
from outpace.engine.job import DecodingError, Job, Listener, lost
from outpace.engine.paces import Paces
from outpace.engine.pairing import Pairing
from outpace.engine.prefix import Saved
from outpace.engine.runner import Runner
from outpace.methods import Method
from outpace.methods.method import check_type

LOG = logging.getLogger(__name__)

Pacing = Literal["off", "auto"]
"""How parallel methods are: as their options say, or as the load lets it pay."""

Work = tuple[Job, Feed, Feed | None]
"""A job, what it feeds in a pass, and what is left of its forward for a later one."""


class Engine:
    """Runs requests of any methods together: drafts first, the target last.

    `max_rows` bounds the rows of a pass (a longer causal prefill is cut, which no method
    notices), `max_sequences` the requests that run at a time; others queue in order. An engine
    belongs to one thread at a time. All that waits is found among the requests that run, so an
    exception that leaves a step, such as Ctrl-C, loses nobody: the next step runs again what was
    not finished. With `pace` "auto" a `Pace` decides, by the `clock`, how parallel methods are.
    """

    def __init__(
        self,
        *,
        max_rows: int = 2048,
        max_sequences: int = 256,
        pace: Pacing = "off",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_type("pace", pace, Pacing)
        for name, value in {"max_rows": max_rows, "max_sequences": max_sequences}.items():
            if not (is_whole(value) and value >= 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        self.max_rows = max_rows
        self.max_sequences = max_sequences
        self.runners: list[Runner] = []
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.pace = pace
        self.clock = clock
        self.paces = Paces()
        self.turns = count()
        self.broken = False
        self.aside = False
        """Whether a device works while the host does something else: then listeners are called."""
        self.untold: deque[Job] = deque()
        """Who got tokens by the last pass, and whose listener has not heard of it."""

    def add(self, runner: Runner) -> None:
        """Add a model; the first one added runs last in every turn."""
        self.runners = [runner, *self.runners]
        self.aside = self.aside or runner.device.type != "cpu"

    def job(
        self,
        method: Method,
        prompt: Sequence[int],
        *,
        pairing: Pairing,
        max_tokens: int,
        sampling: Sampling | None = None,
        eos: frozenset[int] | None = None,
        logprobs: bool = False,
        processors: tuple[Processor, ...] = (),
        constraint: Constraint | None = None,
        given: Mapping[int, int] | None = None,
        listener: Listener | None = None,
    ) -> Job:
        """A request that is ready to enter, from any thread.

        `given` are the tokens of a cloze, whose slots are all filled. `listener` is called after
        every forward that committed tokens and at the end. Raises `ValueError` for a request that
        could never run.
        """
        request = Request(
            prompt=list(prompt),
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
            eos=frozenset(pairing.runners["target"].config.eos) if eos is None else eos,
            target=pairing.target,
            logprobs=logprobs,
            processors=processors,
            constraint=constraint,
            given=given or {},
            cloze=given is not None,
        )
        pairing.check(method, request)
        request.pace = self.paces.of(method, pairing, auto=self.pace == "auto")
        return Job(request=request, method=method, pairing=pairing, listener=listener)

    def enter(self, job: Job) -> Job:
        """Queue a request; once, however often this is called, and not one that was cancelled."""
        if not job.done and job.decoding is None and job not in self.queue:
            self.queue.append(job)
        return job

    def step(self) -> bool:
        """One pass of the first model anyone waits for, over all who wait for it.

        False where nothing is left to do.
        """
        if self.broken:
            self.recover()
        self.broken = True
        self.admit()
        waiting: list[Job] = []
        for runner in self.runners:
            if waiting := [job for job in self.running if job.runner is runner]:
                began = self.clock()
                work = self.take(runner, sorted(waiting, key=attrgetter("turn")))
                paced = self.paced(work)
                self.run(runner, work)
                for pace, role in paced:
                    pace.passed(role, sum(feed.size for _, feed, _ in work), self.clock() - began)
                break
        if not (waiting and self.aside):
            self.tell_all()
        self.broken = False
        return bool(waiting)

    def recover(self) -> None:
        """Make whole again what an exception that left a step has left behind."""
        self.queue = deque(job for job in self.queue if job not in self.running)
        for runner in self.runners:
            runner.cache.recount(
                table
                for job in self.running
                for role, table in job.tables.items()
                if job.pairing.runners[role] is runner
            )
        for job in list(self.running):
            if not job.done and job.decoding is not None and job.runner is None:
                job.error = DecodingError(f"{job.method!r} was interrupted")
            if job.done:
                self.finish(job)

    def cancel(self, job: Job) -> None:
        """End a request where it is; its pages are free at once."""
        if job.done:
            return
        broken, self.broken = self.broken, True
        job.request.finish_reason = "cancelled"
        if job in self.queue:
            self.queue.remove(job)
        self.finish(job)
        self.broken = broken

    def admit(self) -> None:
        """Let requests in, and let them begin, once all who come in together are counted."""
        while entered := self.entered():
            for job in entered:
                if not job.done:
                    if (pace := job.request.pace) is not None:
                        pace.run(len(self.running))
                    self.advance(job, None)
                if job.done and job in self.running:
                    self.finish(job)

    def entered(self) -> list[Job]:
        """Who runs and has not begun: those of the queue, in order, while memory can be reserved.

        An interrupt may have left some from before.
        """
        while self.queue and len(self.running) < self.max_sequences:
            job = self.queue[0]
            if not job.reserve():
                break
            self.running.append(job)
            self.queue.popleft()
            job.began = time.perf_counter()
        return [job for job in self.running if job.decoding is None]

    def take(self, runner: Runner, waiting: Sequence[Job]) -> list[Work]:
        """What goes into the next pass, in order of waiting, up to `max_rows` rows.

        A long causal forward is cut; what is left of it waits behind the others.
        """
        work: list[Work] = []
        room = self.max_rows
        for job in waiting:
            try:
                feed = job.spare(runner)
            except ValueError as error:
                self.fail(job, error)
                continue
            size = feed.size
            if size > room:
                if cut := feed.apart(room):
                    work.append((job, *feed.cut(cut)))
                    job.turn = next(self.turns)
                    break
                if work:
                    break
            work.append((job, feed, None))
            room -= size
            if room <= 0:
                break
        return work

    def run(self, runner: Runner, work: Sequence[Work]) -> None:
        """One pass, and what its requests make of it."""
        work = [each for each in work if not each[0].done]
        if not work:
            return
        began = time.perf_counter()
        try:
            predictions = runner.run([feed for _, feed, _ in work], self.tell_all)
        except Exception as error:
            self.failed(runner, work, error)
            return
        seconds = time.perf_counter() - began
        runner.learn((feed, job.request.ids) for job, feed, _ in work)
        for (job, _, rest), prediction in zip(work, predictions, strict=True):
            # A listener that hears of one request's end may have cancelled another.
            if not job.done:
                job.seconds += seconds
                self.resume(job, rest, prediction)

    def failed(self, runner: Runner, work: Sequence[Work], error: Exception) -> None:
        """End all requests where the device is lost, the newest of a pass where memory is short.

        Else each has a pass of its own, so that only the guilty end: what is no number may have
        come from a neighbour's memory as well.
        """
        if isinstance(error, torch.AcceleratorError):
            ended = [*self.running, *self.queue]
            self.queue.clear()
        elif len(work) == 1:
            ended = [work[0][0]]
        elif isinstance(error, torch.OutOfMemoryError):
            ended = [max((job for job, _, _ in work), key=attrgetter("began"))]
            self.max_sequences = max(len(self.running) - 1, 1)
            LOG.warning(
                "memory is short: from now on %d requests run at a time", self.max_sequences
            )
        else:
            for each in work:
                self.run(runner, [each])
            return
        for job in ended:
            self.fail(job, error)

    def paced(self, work: Sequence[Work]) -> set[tuple[Pace, str]]:
        """Who decides by what a pass takes, and the role that it has; they hear of the load."""
        paced = {
            (pace, feed.model) for job, feed, _ in work if (pace := job.request.pace) is not None
        }
        for pace, _ in paced:
            pace.run(len(self.running))
        return paced

    @property
    def saved(self) -> Saved:
        """What the prefix caches of all models have spared so far."""
        found = [runner.prefix.saved for runner in self.runners if runner.prefix is not None]
        return Saved(*map(sum, zip(*found, strict=True))) if found else Saved()

    def resume(self, job: Job, rest: Feed | None, prediction: Prediction) -> None:
        """Give a method what it waited for, and note the step that it made of it."""
        if rest is not None:
            job.put_by(rest, prediction)
            return
        whole, before, dial = job.whole, len(job.request.ids), job.request.dialled
        assert whole is not None
        self.advance(job, job.joined(prediction))
        kept = job.note(whole, before, dial)
        if job.done:
            self.finish(job)
        elif job.listener is not None and (kept or job.watched):
            self.untold.append(job)

    def advance(self, job: Job, prediction: Prediction | None) -> None:
        """Run a method to its next forward; an error ends this request alone."""
        try:
            job.advance(prediction)
            job.turn = next(self.turns)
        except StopIteration:
            if job.request.finish_reason is None:
                job.error = DecodingError(f"{job.method!r} returned before the request had ended")
        except Exception as error:
            job.error = job.failure(error)
        except BaseException as error:
            job.error = job.failure(error)
            raise

    def fail(self, job: Job, error: Exception) -> None:
        """End a request whose forward could not be run."""
        job.error = job.failure(error)
        self.finish(job)

    def finish(self, job: Job) -> None:
        """Close a request's method and give its pages back."""
        try:
            job.ended, job.runner = time.perf_counter(), None
            if job in self.running:
                self.running.remove(job)
            job.release(scrub=job.error is not None and not lost(job.error))
            job.close()
            self.tell(job)
        finally:
            job.over = True

    def tell_all(self) -> None:
        """Call the listeners that have not heard of the last pass."""
        while self.untold:
            job = self.untold.popleft()
            if not job.done:
                self.tell(job)

    def tell(self, job: Job) -> None:
        """Call the listener of a request; one that fails ends its own request."""
        if job.listener is None:
            return
        try:
            job.listener(job.request)
        except Exception as error:
            if job.done:
                job.error = job.error or job.failure(error)
            else:
                self.fail(job, error)
