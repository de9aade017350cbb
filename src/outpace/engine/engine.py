"""The engine schedules the forwards of many requests into one ragged pass per step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from typing import Literal

import torch

from outpace.decoding import Prediction
from outpace.engine.cache import CacheFullError
from outpace.engine.controllers import ControllerTable, StoredPassCosts
from outpace.engine.job import DecodingError, Job, is_device_lost
from outpace.engine.pack import ScheduledForward
from outpace.engine.prefix import PrefixStats
from outpace.engine.readout import LaunchedPass
from outpace.engine.runner import LayerReport, Runner
from outpace.field_types import PositiveInt, check_value

LOG = logging.getLogger(__name__)

Work = tuple[Job, ScheduledForward, ScheduledForward | None]
"""A job, its forward in this pass, and the rest of that forward for a later pass."""

Pacing = Literal["off", "auto"]
"""Whether draft lengths follow the options ("off") or the measured load ("auto")."""


class Engine:
    """Runs requests of any methods together: drafts first, the target last.

    An engine belongs to one thread at a time. An exception that leaves a step, such as Ctrl-C,
    loses no request: the next step runs the unfinished forwards again.

    Args:
        max_rows: most rows of a pass; a longer causal prefill is split, which no method notices.
        max_sequences: most requests that run at a time; others queue in order of arrival.
        pace: with "auto", a controller chooses how parallel the methods are.
        clock: time source of the controller, in seconds.
        pass_costs: stored costs of passes, from which the controllers start.
    """

    def __init__(
        self,
        *,
        max_rows: int = 2048,
        max_sequences: int = 256,
        pace: Pacing = "off",
        clock: Callable[[], float] = time.perf_counter,
        pass_costs: StoredPassCosts | None = None,
    ) -> None:
        check_value("pace", pace, Pacing)
        for name, value in {"max_rows": max_rows, "max_sequences": max_sequences}.items():
            check_value(name, value, PositiveInt)
        self.max_rows, self.max_sequences = max_rows, max_sequences
        self.runners: list[Runner] = []
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self.pace = pace
        self.clock = clock
        self.controllers = ControllerTable(pass_costs)
        self.turn_counter = count()
        self.needs_recovery = False
        self.is_async = False
        """Whether passes run on a device while the host continues."""
        self.pending_callbacks: deque[Job] = deque()
        """Jobs with new tokens whose listeners have not been called yet."""

    def add_runner(self, runner: Runner) -> None:
        """Add a model; the first one added runs last in every step."""
        self.runners = [runner, *self.runners]
        self.is_async = self.is_async or runner.device.type != "cpu"

    def prepare_job(self, job: Job) -> Job:
        """Prepare a job to be queued; callable from any thread.

        Raises `ValueError` for a request that could never run on its models.
        """
        job.pairing.check_request(job.method, job)
        auto = self.pace == "auto"
        job.pace = self.controllers.controller_for(job.method, job.pairing, auto=auto)
        return job

    def enqueue(self, job: Job) -> Job:
        """Queue a job once; repeated calls and ended jobs are ignored."""
        if not job.has_ended and job.decoding is None and job not in self.queue:
            self.queue.append(job)
        return job

    def step(self, report: LayerReport | None = None) -> bool:
        """Run one pass of the first model that a job waits for; return False if none waits.

        Drafts come before targets. Listeners are called while a device computes, on a CPU directly,
        and `report` while layers do.
        """
        if self.needs_recovery:
            self.recover()
        self.needs_recovery = True
        self.admit_jobs()
        started = self.clock()
        has_work = any(job.runner for job in self.running)
        runner, work = self.schedule_step()
        if runner is not None:
            runner.report = report
            measured = (
                self.controllers.pass_controllers(work, self.load) if self.controllers else ()
            )
            launched = self.launch_pass(runner, work)
            self.run_callbacks()
            self.finish_pass(runner, work, launched)
            for pace, role in measured:
                pace.record_pass(
                    role,
                    sum(forward.end - forward.first_slot for _, forward, _ in work),
                    self.clock() - started,
                )
        if runner is None or not self.is_async:
            self.run_callbacks()
        self.needs_recovery = False
        return has_work

    def schedule_step(self) -> tuple[Runner | None, list[Work]]:
        """Return the first model with jobs that can run, and their forwards."""
        for runner in self.runners:
            if work := self.schedule_pass(runner):
                return runner, work
        return None, []

    def recover(self) -> None:
        """Restore the engine after an exception that left a step.

        Jobs of an interrupted pass still wait, and are launched again.
        """
        self.queue = deque(job for job in self.queue if job not in self.running)
        for runner in self.runners:
            runner.cache.recount_references(
                table
                for job in self.running
                for role, table in job.tables.items()
                if job.pairing.runners[role] is runner
            )
        for job in reversed(list(self.running)):
            if not job.has_ended and job.decoding is None:
                self.requeue_job(job)
            elif not job.has_ended and job.runner is None:
                job.error = DecodingError(f"{job.method!r} was interrupted")
            if job.has_ended:
                self.finish_job(job)

    def cancel(self, job: Job) -> None:
        """End a job where it is, and free its pages."""
        if job.has_ended:
            return
        # If Ctrl-C interrupts the next lines, `recover` finishes the job.
        needed_recovery, self.needs_recovery = self.needs_recovery, True
        job.finish_reason = "cancelled"
        if job in self.queue:
            self.queue.remove(job)
        self.finish_job(job)
        self.needs_recovery = needed_recovery

    def admit_jobs(self) -> None:
        """Admit jobs and start their methods, once all that are admitted together are counted."""
        while admitted := self.reserve_queued():
            load = self.load
            for job in admitted:
                if not job.has_ended:
                    if (pace := job.pace) is not None:
                        pace.set_load(*load)
                    self.advance_job(job, None)
                if job.has_ended and job in self.running:
                    self.finish_job(job)

    @property
    def load(self) -> tuple[int, int]:
        """Number of running requests, and their mean tokens with those of prompts."""
        requests = max(len(self.running), 1)
        return requests, sum(map(len, self.running)) // requests

    def reserve_queued(self) -> list[Job]:
        """Reserve memory for queued jobs, in order; return all admitted jobs not started yet.

        An interrupt may have left some from an earlier call.
        """
        while self.queue and len(self.running) < self.max_sequences:
            job = self.queue[0]
            if not job.reserve_memory():
                break
            self.running.append(job)
            self.queue.popleft()
            job.began = job.began or time.perf_counter()
        return [job for job in self.running if job.decoding is None]

    def schedule_pass(self, runner: Runner) -> list[Work]:
        """Return the forwards of the next pass, first come first served, up to `max_rows` rows.

        A long causal forward is split; its rest waits after the others.
        """
        waiting = [job for job in self.running if job.runner is runner]
        work: list[Work] = []
        room = self.max_rows
        for job in sorted(waiting, key=attrgetter("turn")):
            if (parts := self.prepare_forward(runner, job, room, work)) is None:
                continue
            forward, rest = parts
            # Later jobs do not overtake a forward that is too long for the rest of this pass.
            if rest is None and work and forward.end - forward.first_slot > room:
                break
            work.append((job, forward, rest))
            room -= forward.end - forward.first_slot
            if rest is not None:
                job.turn = next(self.turn_counter)
            if room <= 0:
                break
        return work

    def prepare_forward(
        self, runner: Runner, job: Job, room: int, work: list[Work]
    ) -> tuple[ScheduledForward, ScheduledForward | None] | None:
        """Return what a job runs in a pass with room for some rows, and the rest of its forward.

        Rows that the prefix cache holds are skipped, and pages are taken for the others. Where they
        are short, the last request loses its own. Returns None if that is the job itself.
        """
        while job.runner is runner:
            try:
                forward, rest = job.apply_prefix_cache(runner), None
                is_long = forward.end - forward.first_slot > room
                if is_long and (cut := forward.find_split(room)):
                    forward, rest = forward.split_at(cut)
                runner.prepare_write(forward)
                return forward, rest
            except CacheFullError as error:
                self.preempt_last(runner, job, work, error)
            except ValueError as error:
                self.fail_job(job, error)
        return None

    def preempt_last(
        self, runner: Runner, job: Job, work: list[Work], error: CacheFullError
    ) -> None:
        """Free the pages of the last request that may begin again, or fail a job without one."""
        for last in reversed(self.running):
            if last.may_begin_again and (last is job or last.has_pages(runner)):
                # What it was to run in this pass would read pages that others may take now.
                work[:] = [each for each in work if each[0] is not last]
                self.requeue_job(last)
                return
        self.fail_job(job, error)

    def requeue_job(self, job: Job) -> None:
        """Free the memory of a running job, which waits before all others to begin again."""
        self.queue.appendleft(job)
        job.reset_method()
        if job.has_ended:
            self.queue.remove(job)
            self.finish_job(job)
        else:
            self.running.remove(job)

    def launch_pass(self, runner: Runner, work: list[Work]) -> LaunchedPass | None:
        """Start a pass on a device; return None where no job is left or the launch fails."""
        work[:] = [each for each in work if not each[0].has_ended]
        if not work:
            return None
        try:
            return runner.launch_pass([forward for _, forward, _ in work])
        except Exception as error:
            self.handle_failure(runner, work, error)
            return None

    def finish_pass(
        self, runner: Runner, work: Sequence[Work], launched: LaunchedPass | None
    ) -> None:
        """Wait for a pass and resume its jobs."""
        if launched is None:
            return
        try:
            predictions = launched.collect_predictions()
        except Exception as error:
            self.handle_failure(runner, work, error)
            return
        seconds = time.perf_counter() - launched.began
        results = [pair for pair in zip(work, predictions, strict=True) if not pair[0][0].has_ended]
        runner.register_prefix((forward, job.ids) for (job, forward, _), _ in results)
        for (job, _, rest), prediction in results:
            # The listener of a request that ended may have cancelled another.
            if not job.has_ended:
                job.seconds += seconds
                self.resume_job(job, rest, prediction)

    def handle_failure(self, runner: Runner, work: Sequence[Work], error: Exception) -> None:
        """End the requests of a failed pass, or run each of them alone.

        A lost device ends all requests, and a lack of memory the newest one of the pass. Otherwise
        each forward runs again alone, so that only the faulty requests end: NaNs may also come from
        another request's memory.
        """
        remaining = [each for each in work if not each[0].has_ended]
        failed_jobs = [job for job, _, _ in remaining]
        if isinstance(error, torch.AcceleratorError):
            failed_jobs = [*self.running, *self.queue]
            self.queue.clear()
        elif isinstance(error, torch.OutOfMemoryError) and len(remaining) > 1:
            failed_jobs = [max(failed_jobs, key=attrgetter("began"))]
            # Memory sufficed until the newest one came.
            self.max_sequences = max(len(self.running) - 1, 1)
            LOG.warning("out of memory: max_sequences is now %d", self.max_sequences)
        elif len(remaining) > 1:
            for each in remaining:
                single = [each]
                self.finish_pass(runner, single, self.launch_pass(runner, single))
            return
        for job in failed_jobs:
            self.fail_job(job, error)

    @property
    def prefix_stats(self) -> PrefixStats:
        """Hits and skipped rows of the prefix caches of all models."""
        stats = [
            runner.prefix_cache.stats for runner in self.runners if runner.prefix_cache is not None
        ]
        return PrefixStats(*map(sum, zip(*stats, strict=True))) if stats else PrefixStats()

    def resume_job(self, job: Job, rest: ScheduledForward | None, prediction: Prediction) -> None:
        """Send a prediction to a method and record its step in the trace."""
        if rest is not None:
            job.store_partial(rest, prediction)
            return
        # The method replaces all three when it resumes.
        forward, before, length = job.full_forward, len(job.ids), job.cycle_length
        assert forward is not None
        self.advance_job(job, job.join_features(prediction))
        accepted = job.record_step(forward, before, length)
        if job.has_ended:
            self.finish_job(job)
        elif job.listener is not None and (accepted or job.notify_always):
            self.pending_callbacks.append(job)

    def advance_job(self, job: Job, prediction: Prediction | None) -> None:
        """Run a method to its next forward; an error ends this request only."""
        try:
            job.advance_method(prediction)
            job.turn = next(self.turn_counter)
        except StopIteration:
            if job.finish_reason is None:
                job.error = DecodingError(f"{job.method!r} returned before the request had ended")
        except Exception as error:
            job.error = job.wrap_error(error)
        except BaseException as error:
            job.error = job.wrap_error(error)
            raise

    def fail_job(self, job: Job, error: Exception) -> None:
        """End a request whose forward could not run."""
        job.error = job.wrap_error(error)
        self.finish_job(job)

    def finish_job(self, job: Job) -> None:
        """Close a request's method and free its pages."""
        try:
            job.ended, job.runner = time.perf_counter(), None
            if job in self.running:
                self.running.remove(job)
            job.release_memory(zero=job.error is not None and not is_device_lost(job.error))
            job.close_method()
            self.notify_listener(job)
        finally:
            job.is_finished = True

    def run_callbacks(self) -> None:
        """Call the listeners of the jobs that the last pass gave tokens."""
        while self.pending_callbacks:
            job = self.pending_callbacks.popleft()
            if not job.has_ended:
                self.notify_listener(job)

    def notify_listener(self, job: Job) -> None:
        """Call the listener of a job; an exception that it raises ends its own request."""
        if job.listener is None:
            return
        try:
            job.listener(job)
        except Exception as error:
            if job.has_ended:
                job.error = job.error or job.wrap_error(error)
            else:
                self.fail_job(job, error)
