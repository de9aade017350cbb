"""The answer to a request while it is being generated, and its output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outpace.api.detokenizer import Detokenizer
from outpace.api.driver import Driver
from outpace.api.infill import InfillLayout
from outpace.api.output import Event, Output, PromptProgress
from outpace.api.parts import AnswerFormat
from outpace.decoding.processor import TokenLogprob
from outpace.engine.job import DecodingError, Job


@dataclass(slots=True, kw_only=True, eq=False)
class PendingAnswer(Job):
    """A request in progress, with its text so far.

    The driving thread decodes text. Another thread may take `pieces`, and the output once the
    request is finished.

    Attributes:
        layout: Layout of an infill template, or None.
        streams: Whether `pieces` receives the text that each forward committed.
        number: Number of the request at its client.
        has_events: Whether its client receives events before the last one.
        tokens_sent: Number of tokens in the events so far.
        steps_sent: Number of steps in the events so far.
        read_sent: Number of tokens of the prompt that the events so far count as read.
    """

    detokenizer: Detokenizer
    layout: InfillLayout | None = None
    streams: bool = False
    pieces: deque[str] = field(default_factory=deque)
    number: int = 0
    has_events: bool = False
    tokens_sent: int = 0
    steps_sent: int = 0
    read_sent: int = 0

    @property
    def format(self) -> AnswerFormat:
        """Format of the answer."""
        return self.detokenizer.format

    @property
    def suffix(self) -> Mapping[int, int] | None:
        """Tokens of the suffix that follows an infilled answer, by slot; None without one."""
        return self.layout.given if self.layout is not None and self.layout.is_suffix else None

    def decode_tokens(self) -> bool:
        """Decode new tokens; returns True if a stop string ends the answer."""
        # Counted by the decoded tokens, so Ctrl-C while one is decoded loses none after it.
        begin = len(self.prompt) + len(self.detokenizer.ids)
        end = None if self.suffix is None else self.limit - len(self.suffix)
        stopped = self.detokenizer.push_tokens(self.ids[begin:end])
        self.detokenizer.push_end(self.end_token)
        if self.streams:
            self.pieces.append(self.take_text())
        return stopped

    def take_text(self) -> str:
        """Return the text since the last call."""
        return self.detokenizer.take_text(final=self.finish_reason is not None)

    @property
    def progress(self) -> PromptProgress:
        """How much of the prompt the target has read."""
        total, step = len(self.prompt), next((s for s in self.trace if s.model == "target"), None)
        milliseconds = round((time.perf_counter() - self.began) * 1000)
        if step is None:
            return PromptProgress(total, self.num_cached, self.prompt_read, milliseconds)
        return PromptProgress(total, step.cached, total, milliseconds)

    def has_event(self, complete: bool) -> bool:
        """Return whether progress is to be sent: of reading the prompt, or of the answer."""
        return self.has_text_event(complete) or self.has_progress

    @property
    def has_progress(self) -> bool:
        """Whether its client has not received how much of the prompt has been read."""
        is_reading = self.has_events and self.read_sent < len(self.prompt)
        return is_reading and self.progress.processed > self.read_sent

    def has_text_event(self, complete: bool) -> bool:
        """Return whether its end, first text or, if `complete`, any new token is to be sent."""
        if self.is_finished or not self.has_events:
            return self.is_finished
        if self.notify_always:
            return len(self.trace) > self.steps_sent
        has_new = len(self) - len(self.prompt) > self.tokens_sent
        return has_new and (complete or not self.tokens_sent)

    def take_event(self) -> Event:
        """Return the progress since the previous event, or the error of decoding its text."""
        event = Event(number=self.number)
        if self.has_progress:
            event.progress = self.progress
            self.read_sent = event.progress.processed
            if not self.has_text_event(complete=True):
                return event
        event.steps = self.trace[self.steps_sent :]
        try:
            if self.has_events:
                self.add_text(event)
            if self.is_finished:
                event.output = replace(self.build_output(), steps=[])  # events have them
        except Exception as error:
            return Event(number=self.number, error=error)
        self.steps_sent = len(self.trace)
        return event

    def add_text(self, event: Event) -> None:
        """Add the text and the tokens since the previous event."""
        self.decode_tokens()
        event.text, event.parts = self.take_text(), self.detokenizer.parser.take()
        begin, self.tokens_sent = self.tokens_sent, len(self.detokenizer.ids)
        ids = self.tokens[begin : self.tokens_sent]
        places = range(len(ids)) if self.suffix is None else self.find_text_places(ids)
        event.ids = [ids[place] for place in places]
        event.chosen = self.count_chosen(begin, self.tokens_sent)
        if self.logprobs:
            event.logprobs = [self.scores[begin + place] for place in places]
        if self.notify_always and self.finish_reason is None:
            mask = self.target.mask_id
            canvas = self.canvas[len(self) :]
            event.canvas = [-1 if token == mask else token for token in canvas]
        if not self.steps_sent:
            event.prompt_logprobs = self.all_prompt_scores

    @property
    def all_prompt_scores(self) -> list[TokenLogprob | None] | None:
        """Log-probabilities of the prompt, None for its first token; None if not computed."""
        is_scored = len(self.prompt_scores) == len(self.prompt) - 1
        wanted = self.prompt_logprobs is not None and is_scored
        return [None, *self.prompt_scores] if wanted else None

    def count_chosen(self, begin: int, end: int) -> int:
        """Return how many tokens from `begin` to `end` the model chose, without padding."""
        layout, tokens = self.layout, self.tokens[begin:end]
        if layout is None:
            return len(tokens)
        slots = enumerate(tokens, len(layout.prompt) + begin)
        return sum(slot not in layout.given and token not in layout.ends for slot, token in slots)

    def build_output(self) -> Output:
        """Return the output of a request that has ended; raises the error of its method, if any."""
        if self.error is not None:
            raise self.error
        detokenizer = self.detokenizer
        assert self.finish_reason is not None
        if self.layout is not None and self.suffix is None:
            return self.build_infill_output(self.layout)
        self.decode_tokens()
        detokenizer.take_text(final=True)
        output = Output(
            text=detokenizer.text,
            ids=detokenizer.ids,
            finish_reason="stop" if detokenizer.stopped else self.finish_reason,
            steps=self.trace,
            prompt_tokens=len(self.prompt),
            max_tokens=self.max_tokens,
            seconds=self.ended - self.began,
            logprobs=self.scores[: len(detokenizer.ids)] if self.logprobs else None,
            prompt_logprobs=self.all_prompt_scores,
            choice_logprobs=self.choice_scores or None,
            codec=detokenizer.codec,
            format=self.format,
            parsed=detokenizer.parser.parts,
            stop_string=detokenizer.stop_string or detokenizer.stop_tokens.get(self.end_token),
        )
        return output if self.suffix is None else self.drop_padding(output, self.suffix)

    def drop_padding(self, output: Output, suffix: Mapping[int, int]) -> Output:
        """Return the output of an infilled answer without padding; `suffix` is the text after it.

        Raises `DecodingError` if it is neither filled nor stopped.
        """
        ended = output.finish_reason == "cancelled" or output.stop_string is not None
        if not ended:
            self.check_filled()
        places = self.find_text_places(output.ids)
        max_tokens = self.max_tokens - len(suffix)
        is_full = len(places) == max_tokens
        return replace(
            output,
            ids=[output.ids[place] for place in places],
            finish_reason=output.finish_reason if ended else "length" if is_full else "stop",
            suffix_tokens=len(suffix),
            max_tokens=max_tokens,
            logprobs=output.logprobs and [output.logprobs[place] for place in places],
        )

    def find_text_places(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the places of tokens of an infilled answer that are no padding."""
        assert self.layout is not None
        return [place for place, token in enumerate(ids) if token not in self.layout.ends]

    def check_filled(self) -> None:
        """Raise `DecodingError` if a hole of an infill template is unfilled."""
        if len(self) < self.limit:
            raise DecodingError(
                f"{self.method!r} left holes unfilled from slot {len(self)} on "
                f"({self.finish_reason})"
            )

    def build_infill_output(self, layout: InfillLayout) -> Output:
        """Return the output of an infill template; raises `DecodingError` if a hole is unfilled."""
        assert self.finish_reason is not None
        self.check_filled()
        filled, tokens = layout.decode_answer(self.tokens), self.tokens
        lead = len(self.prompt) - layout.lead
        scores = None
        if self.logprobs:
            scores = [0.0] * layout.lead + [self.scores[place] for place in filled.answer_places]
        return Output(
            text=filled.text,
            ids=self.prompt[lead:] + [tokens[place] for place in filled.answer_places],
            finish_reason=self.finish_reason,
            steps=self.trace,
            prompt_tokens=lead,
            seconds=self.ended - self.began,
            logprobs=scores,
            prompt_logprobs=self.all_prompt_scores,
            holes=filled.holes,
            given=filled.given,
        )


class Stream(Iterator[str]):
    """Iterator over the text of one answer, one piece per forward that committed text.

    Closing the stream, or letting it be garbage-collected, cancels the request.

    Attributes:
        output: The `Output`, once the iterator is exhausted; None before.
    """

    def __init__(self, driver: Driver, answer: PendingAnswer) -> None:
        self.driver = driver
        self.answer = answer
        self.output: Output | None = None

    def __next__(self) -> str:
        """Return the next piece of text; raises the error of the method, if any."""
        while self.output is None:
            over = (
                self.answer.is_finished
            )  # read first: the last piece is appended before it is set
            if self.answer.pieces:
                if text := self.answer.pieces.popleft():
                    return text
            elif over:
                self.output = self.answer.build_output()
            else:
                self.driver.step()
        raise StopIteration

    def read_prompt(self) -> Iterator[PromptProgress]:
        """Read the prompt, and yield the progress after each step."""
        while not self.answer.is_finished and not self.answer.pieces:
            self.driver.step()
            yield self.answer.progress

    def close(self) -> None:
        """Cancel the rest of the request."""
        self.driver.cancel(self.answer)

    def __del__(self) -> None:
        # The garbage collector may run in any thread, including the driving one.
        if self.output is None:
            self.driver.cancel_later(self.answer)
