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
from outpace.decoding.sampling import is_whole
from outpace.engine.feed import Feed
from outpace.engine.job import DecodingError, Job, Listener, lost
from outpace.engine.overlap import Flight, Overlap, Work, half, rows_of
from outpace.engine.paces import Paces, hear
from outpace.engine.pairing import Pairing
from outpace.engine.prefix import Saved
from outpace.engine.runner import Runner
from outpace.methods import Method
from outpace.methods.method import check_type

LOG = logging.getLogger(__name__)

Pacing = Literal["off", "auto"]
"""How parallel methods are: as their options say, or as the load lets it pay."""


class Engine:
    """Runs requests of any methods together: drafts first, the target last.

    `max_rows` bounds the rows of a pass (a longer causal prefill is cut, which no method
    notices), `max_sequences` the requests that run at a time; others queue in order. An engine
    belongs to one thread at a time. All that waits is found among the requests that run, so an
    exception that leaves a step, such as Ctrl-C, loses nobody: the next step runs again what was
    not finished. With `pace` "auto" a `Pace` decides, by the `clock`, how parallel methods are; an
    `Overlap` decides whether one half of the requests runs while the other is decided.
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
        self.max_rows, self.max_sequences = max_rows, max_sequences
        self.runners: list[Runner] = []
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.pace = pace
        self.clock = clock
        self.paces = Paces()
        self.overlap = Overlap(False)
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
        """One pass of the first model anyone waits for, over all who wait for it.

        False where nothing is left to do.
        """
        if self.broken:
            self.recover()
        self.broken = True
        self.admit()
        more = self.advanced()
        if not (more and self.aside):
            self.tell_all()
        self.broken = False
        return more

    def advanced(self) -> bool:
        """Launch the next pass and land one; False where there is none.

        It is the one that was launched, but while the other half of the requests waits: then it is
        the one before it.
        """
        before, began = self.overlap.flight, self.clock()
        waiting = self.overlap.waiting(self.running)
        asked = {job.runner for job in waiting}
        runner = next((each for each in self.runners if each in asked), None)
        if runner is None:
            self.overlap.pause()
            self.land(before)
            return before is not None
        work = self.take(runner, [job for job in waiting if job.runner is runner])
        main = runner is self.runners[-1]
        halves = len(self.running) > 1 and self.aside and self.overlap.next(main, work, began)
        if halves and before is None:
            work = half(work)
        paced = hear(work, self.overlap.together(self.running))
        self.overlap.flight = flight = self.launch(runner, work)
        self.tell_all()
        self.land(before)
        if not (halves and self.overlap.waiting(self.running)):
            self.overlap.flight = None
            self.land(flight)
        for pace, role in paced:
            pace.passed(role, rows_of(work), self.clock() - began)
        return True

    def recover(self) -> None:
        """Make whole again what an exception that left a step has left behind.

        Who was in flight still waits, and is launched again.
        """
        self.overlap.flight = None
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
        self.overlap.left()
        self.broken = broken

    def admit(self) -> None:
        """Let requests in, and let them begin, once all who come in together are counted."""
        while entered := self.entered():
            for job in entered:
                if not job.done:
                    if (pace := job.request.pace) is not None:
                        pace.run(self.overlap.together(self.running))
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

    def launch(self, runner: Runner, work: Sequence[Work]) -> Flight | None:
        """Tell a device to run a pass; None where nothing comes of it."""
        work = [each for each in work if not each[0].done]
        if not work:
            return None
        began, start = time.perf_counter(), self.clock()
        try:
            launched = runner.launch([feed for _, feed, _ in work])
        except Exception as error:
            self.failed(runner, work, error)
            return None
        return Flight(runner, work, launched, began, start)

    def land(self, flight: Flight | None) -> None:
        """Wait for a pass, if there is one; its requests make something of it."""
        if flight is None:
            return
        try:
            predictions = flight.launched.land()
        except Exception as error:
            self.failed(flight.runner, flight.work, error)
            return
        seconds = time.perf_counter() - flight.began
        self.overlap.landed(self.clock() - flight.start)
        found = [each for each in zip(flight.work, predictions, strict=True) if not each[0][0].done]
        flight.runner.learn((feed, job.request.ids) for (job, feed, _), _ in found)
        for (job, _, rest), prediction in found:
            # A listener that hears of one request's end may have cancelled another.
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
                self.land(self.launch(runner, [each]))
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
