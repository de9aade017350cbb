"""A model of an engine loop, and its requests."""

from __future__ import annotations

from dataclasses import replace

from outpace.api.engine_messages import RequestProgress, SubmitCommand
from outpace.api.llm import LLM
from outpace.api.pending_answer import PendingAnswer


class ActiveRequest:
    """A request in an engine, and the number of its steps that were sent."""

    def __init__(self, command: SubmitCommand, answer: PendingAnswer) -> None:
        answer.job.notify_always = command.watched
        self.number = command.number
        self.streams = command.streams or command.watched
        self.answer = answer
        self.steps_sent = 0

    def has_progress(self, complete: bool) -> bool:
        """Return whether its end, first text or, if `complete`, any new token is to be sent."""
        job, last = self.answer.job, self.answer.last_sent
        if job.is_finished or not self.streams:
            return job.is_finished
        if job.notify_always:
            return len(job.request.trace) > last.steps
        has_new = len(job.request) - len(job.request.prompt) > last.tokens
        return has_new and (complete or not last.tokens)

    def collect_progress(self) -> RequestProgress:
        """Return the progress since the last call, or the error of decoding its text."""
        request = self.answer.job.request
        try:
            if self.streams:
                self.answer.decode_tokens(request)
                self.answer.append_piece()
            output = self.answer.build_output() if self.answer.job.is_finished else None
        except Exception as error:
            return RequestProgress(self.number, error=error)
        steps, self.steps_sent = request.trace[self.steps_sent :], len(request.trace)
        event = self.answer.take_event(output and replace(output, steps=[]))
        return RequestProgress(self.number, replace(event, steps=()), steps)


class ServedModel:
    """A model of the loop, and its requests by number."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.driver = llm.driver
        self.requests: dict[int, ActiveRequest] = {}

    def collect_progress(self, complete: bool) -> list[RequestProgress]:
        """Collect progress with exclusive access to the engine, and drop ended requests."""
        found = [
            each.collect_progress()
            for each in self.requests.values()
            if each.has_progress(complete)
        ]
        for progress in found:
            if progress.is_last:
                ended = self.requests.pop(progress.number)
                if progress.error is not None:
                    self.llm.engine.cancel(ended.answer.job)  # it may still be running
        return found

    def close(self) -> None:
        """Free the memory of its requests."""
        for request in [*self.requests.values()]:
            self.driver.cancel(request.answer.job)
