"""The answer to a request while it is being generated, and its output."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outpace.api.detokenizer import Detokenizer
from outpace.api.driver import Driver
from outpace.api.infill import InfillLayout
from outpace.api.output import Event, Output
from outpace.api.parts import AnswerFormat
from outpace.decoding import Request
from outpace.decoding.processor import TokenLogprob
from outpace.engine.job import DecodingError, Job


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """A request in progress, and its text so far.

    The driving thread decodes text. Another thread may take `pieces`, if `streams` is set, and the
    output once the job is over.

    Attributes:
        layout: Layout of an infill template, or None.
        pieces: Text that each forward committed, if `streams` is set.
        tokens_sent: Number of tokens in the events so far.
        steps_sent: Number of steps in the events so far.
    """

    detokenizer: Detokenizer
    streams: bool = False
    layout: InfillLayout | None = None
    pieces: deque[str] = field(default_factory=deque)
    tokens_sent: int = 0
    steps_sent: int = 0
    job: Job = field(init=False)

    @property
    def format(self) -> AnswerFormat:
        """Format of the answer."""
        return self.detokenizer.format

    @property
    def suffix(self) -> Mapping[int, int] | None:
        """Tokens of the suffix that follows an infilled answer, by slot; None without one."""
        return self.layout.given if self.layout is not None and self.layout.is_suffix else None

    def decode_tokens(self, request: Request) -> bool:
        """Decode new tokens; returns True if a stop string ends the answer."""
        # Counted by the decoded tokens, so Ctrl-C while one is decoded loses none after it.
        begin = len(request.prompt) + len(self.detokenizer.ids)
        end = None if self.suffix is None else request.limit - len(self.suffix)
        stopped = self.detokenizer.push_tokens(request.ids[begin:end])
        if self.streams:
            self.pieces.append(self.take_text())
        return stopped

    def take_text(self) -> str:
        """Return the text since the last call."""
        return self.detokenizer.take_text(final=self.job.request.finish_reason is not None)

    def take_event(self, number: int, *, has_text: bool) -> Event:
        """Return the progress since the previous event; without text, only steps and output.

        The output has no steps, since events have them.
        """
        request = self.job.request
        event = Event(number=number, steps=request.trace[self.steps_sent :])
        if has_text:
            self.decode_tokens(request)
            event.text = self.take_text()
            begin, self.tokens_sent = self.tokens_sent, len(self.detokenizer.ids)
            ids = request.tokens[begin : self.tokens_sent]
            places = range(len(ids)) if self.suffix is None else self.find_text_places(ids)
            event.ids = [ids[place] for place in places]
            event.chosen = self.count_chosen(begin, self.tokens_sent)
            if request.logprobs:
                event.logprobs = [request.scores[begin + place] for place in places]
            if self.job.notify_always:
                event.canvas = uncommitted_canvas(request)
            if not self.steps_sent:
                event.prompt_logprobs = self.prompt_logprobs
        self.steps_sent = len(request.trace)
        if self.job.is_finished:
            event.output = replace(self.build_output(), steps=[])
        return event

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Log-probabilities of the prompt, None for its first token; None if not computed."""
        request = self.job.request
        is_scored = len(request.prompt_scores) == len(request.prompt) - 1
        wanted = request.prompt_logprobs is not None and is_scored
        return [None, *request.prompt_scores] if wanted else None

    def count_chosen(self, begin: int, end: int) -> int:
        """Return how many tokens from `begin` to `end` the model chose, without padding."""
        layout, tokens = self.layout, self.job.request.tokens[begin:end]
        if layout is None:
            return len(tokens)
        slots = enumerate(tokens, len(layout.prompt) + begin)
        return sum(slot not in layout.given and token not in layout.ends for slot, token in slots)

    def build_output(self) -> Output:
        """Return the output of a request that has ended; raises the error of its method, if any."""
        if self.job.error is not None:
            raise self.job.error
        request, detokenizer = self.job.request, self.detokenizer
        assert request.finish_reason is not None
        if self.layout is not None and self.suffix is None:
            return self.build_infill_output(self.layout)
        self.decode_tokens(request)
        detokenizer.take_text(final=True)
        output = Output(
            text=detokenizer.text,
            ids=detokenizer.ids,
            finish_reason="stop" if detokenizer.stopped else request.finish_reason,
            steps=request.trace,
            prompt_tokens=len(request.prompt),
            seconds=self.job.ended - self.job.began,
            logprobs=request.scores[: len(detokenizer.ids)] if request.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            codec=detokenizer.codec,
            format=self.format,
            stop_string=detokenizer.stop_string,
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
        is_full = len(places) == self.job.request.max_tokens - len(suffix)
        return replace(
            output,
            ids=[output.ids[place] for place in places],
            finish_reason=output.finish_reason if ended else "length" if is_full else "stop",
            suffix_tokens=len(suffix),
            logprobs=output.logprobs and [output.logprobs[place] for place in places],
        )

    def find_text_places(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the places of tokens of an infilled answer that are no padding."""
        assert self.layout is not None
        return [place for place, token in enumerate(ids) if token not in self.layout.ends]

    def check_filled(self) -> None:
        """Raise `DecodingError` if a hole of an infill template is unfilled."""
        request = self.job.request
        if len(request) < request.limit:
            raise DecodingError(
                f"{self.job.method!r} left holes unfilled from slot {len(request)} on "
                f"({request.finish_reason})"
            )

    def build_infill_output(self, layout: InfillLayout) -> Output:
        """Return the output of an infill template; raises `DecodingError` if a hole is unfilled."""
        request = self.job.request
        assert request.finish_reason is not None
        self.check_filled()
        filled, tokens = layout.decode_answer(request.tokens), request.tokens
        lead = len(request.prompt) - layout.lead
        scores = None
        if request.logprobs:
            scores = [0.0] * layout.lead + [request.scores[place] for place in filled.answer_places]
        return Output(
            text=filled.text,
            ids=request.prompt[lead:] + [tokens[place] for place in filled.answer_places],
            finish_reason=request.finish_reason,
            steps=request.trace,
            prompt_tokens=lead,
            seconds=self.job.ended - self.job.began,
            logprobs=scores,
            prompt_logprobs=self.prompt_logprobs,
            holes=filled.holes,
            given=filled.given,
        )


def uncommitted_canvas(request: Request) -> list[int]:
    """Return the canvas after the committed tokens of a running request; -1 for a mask."""
    if request.finish_reason is not None:
        return []
    mask = request.target.mask_id
    return [-1 if token == mask else token for token in request.canvas[len(request) :]]


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
                self.answer.job.is_finished
            )  # read first: the last piece is appended before it is set
            if self.answer.pieces:
                if text := self.answer.pieces.popleft():
                    return text
            elif over:
                self.output = self.answer.build_output()
            else:
                self.driver.step()
        raise StopIteration

    def close(self) -> None:
        """Cancel the rest of the request."""
        self.driver.cancel(self.answer.job)

    def __del__(self) -> None:
        # The garbage collector may run in any thread, including the driving one.
        if self.output is None:
            self.driver.cancel_later(self.answer.job)
