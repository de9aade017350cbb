"""Many sequences, one ragged pass: who waits for which model, and who goes on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Literal

import torch

from outpace.decoding import Prediction, Request
from outpace.decoding.sampling_params import is_whole
from outpace.engine.feed import Feed
from outpace.engine.job import DecodingError, Job, Listener, lost
from outpace.engine.paces import Paces
from outpace.engine.pairing import Pairing
from outpace.engine.prefix import Saved
from outpace.engine.readout import Launched
from outpace.engine.runner import Runner
from outpace.errors import OptionError
from outpace.methods import Method
from outpace.methods.method import check_type

LOG = logging.getLogger(__name__)

Work = tuple[Job, Feed, Feed | None]
"""A job, what it feeds in a pass, and what is left of its forward for a later pass."""

Pacing = Literal["off", "auto"]
"""How parallel methods are: as their options say, or as the load lets it pay."""


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
                message = f"{name} must be a whole number of at least 1, not {value!r}"
                raise OptionError(name, value, message)
        self.max_rows, self.max_sequences = max_rows, max_sequences
        self.runners: list[Runner] = []
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.pace = pace
        self.clock = clock
        self.paces = Paces()
        self.turns = count()
        self.needs_recovery = False
        self.is_async = False
        """Whether a device computes while the host does something else."""
        self.pending_callbacks: deque[Job] = deque()
        """Jobs with new tokens whose listeners have not been called yet."""

    def add(self, runner: Runner) -> None:
        """Add a model; the first one added runs last in every turn."""
        self.runners = [runner, *self.runners]
        self.is_async = self.is_async or runner.device.type != "cpu"

    def job(
        self, method: Method, request: Request, pairing: Pairing, listener: Listener | None = None
    ) -> Job:
        """A request that is ready to enter, from any thread.

        `listener` is called after every forward that committed tokens and at the end. Raises
        `ValueError` for a request that could never run.
        """
        pairing.check(method, request)
        request.pace = self.paces.of(method, pairing, auto=self.pace == "auto")
        return Job(request=request, method=method, pairing=pairing, listener=listener)

    def enter(self, job: Job) -> Job:
        """Queue a request; once, however often this is called, and not one that was cancelled."""
        if not job.done and job.decoding is None and job not in self.queue:
            self.queue.append(job)
        return job

    def step(self) -> bool:
        """One pass of the first model that a request waits for; False where none is left.

        Drafts come before targets. Listeners are called while a device computes, on a CPU at once.
        """
        if self.needs_recovery:
            self.recover()
        self.needs_recovery = True
        self.admit()
        began = self.clock()
        runner = self.next_runner()
        if runner is not None:
            work = self.schedule(runner)
            paced = self.paces.of_pass(work, len(self.running)) if self.paces else ()
            launched = self.launch(runner, work)
            self.notify_all()
            self.land(runner, work, launched)
            for pace, role in paced:
                pace.passed(role, sum(feed.size for _, feed, _ in work), self.clock() - began)
        if runner is None or not self.is_async:
            self.notify_all()
        self.needs_recovery = False
        return runner is not None

    def next_runner(self) -> Runner | None:
        """The first model that a running job waits for."""
        wanted = {job.runner for job in self.running}
        for runner in self.runners:
            if runner in wanted:
                return runner
        return None

    def recover(self) -> None:
        """Restore the engine after an exception that left a step.

        Jobs of an interrupted pass still wait, and are launched again.
        """
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
        needed, self.needs_recovery = self.needs_recovery, True
        job.request.finish_reason = "cancelled"
        if job in self.queue:
            self.queue.remove(job)
        self.finish(job)
        self.needs_recovery = needed

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

    def schedule(self, runner: Runner) -> list[Work]:
        """Feeds of the next pass, first come first served, up to `max_rows` rows.

        A long causal forward is cut; the rest of it waits after the others.
        """
        waiting = [job for job in self.running if job.runner is runner]
        work: list[Work] = []
        room = self.max_rows
        for job in sorted(waiting, key=attrgetter("turn")):
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

    def launch(self, runner: Runner, work: list[Work]) -> Launched | None:
        """Start a pass on a device; None where it has no job left or fails."""
        work[:] = [each for each in work if not each[0].done]
        if not work:
            return None
        try:
            return runner.launch([feed for _, feed, _ in work])
        except Exception as error:
            self.failed(runner, work, error)
            return None

    def land(self, runner: Runner, work: Sequence[Work], launched: Launched | None) -> None:
        """Wait for a pass and resume its jobs."""
        if launched is None:
            return
        try:
            predictions = launched.land()
        except Exception as error:
            self.failed(runner, work, error)
            return
        seconds = time.perf_counter() - launched.began
        found = [each for each in zip(work, predictions, strict=True) if not each[0][0].done]
        runner.learn((feed, job.request.ids) for (job, feed, _), _ in found)
        for (job, _, rest), prediction in found:
            # The listener of a request that ended may have cancelled another.
            if not job.done:
                job.seconds += seconds
                self.resume(job, rest, prediction)

    def failed(self, runner: Runner, work: Sequence[Work], error: Exception) -> None:
        """End all requests where the device is lost, the newest of a pass where memory is short.

        Else each has a pass of its own, so that only the guilty end: what is no number may have
        come from a neighbour's memory as well.
        """
        left = [each for each in work if not each[0].done]
        ended = [job for job, _, _ in left]
        if isinstance(error, torch.AcceleratorError):
            ended = [*self.running, *self.queue]
            self.queue.clear()
        elif isinstance(error, torch.OutOfMemoryError) and len(left) > 1:
            ended = [max(ended, key=attrgetter("began"))]
            self.max_sequences = max(len(self.running) - 1, 1)
            LOG.warning(
                "memory is short: from now on %d requests run at a time", self.max_sequences
            )
        elif len(left) > 1:
            for each in left:
                alone = [each]
                self.land(runner, alone, self.launch(runner, alone))
            return
        for job in ended:
            self.fail(job, error)

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
            self.pending_callbacks.append(job)

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
            self.notify(job)
        finally:
            job.over = True

    def notify_all(self) -> None:
        """Call the listeners of the jobs that the last pass gave tokens."""
        while self.pending_callbacks:
            job = self.pending_callbacks.popleft()
            if not job.done:
                self.notify(job)

    def notify(self, job: Job) -> None:
        """Call the listener of a job; an exception that it raises ends its own request."""
        if job.listener is None:
            return
        try:
            job.listener(job.request)
        except Exception as error:
            if job.done:
                job.error = job.error or job.failure(error)
            else:
                self.fail(job, error)
