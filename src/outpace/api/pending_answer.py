"""The answer to a request while it is being generated, and its output."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outpace.api.detokenizer import Detokenizer
from outpace.api.driver import Driver
from outpace.api.infill import InfillLayout
from outpace.api.output import Event, Output
from outpace.api.parts import AnswerFormat
from outpace.decoding import Request
from outpace.decoding.processor import TokenLogprob
from outpace.engine.job import DecodingError, Job


class TextPiece(NamedTuple):
    """Text committed by a forward, and the progress so far.

    Attributes:
        text: Committed text of whole characters; empty while it is held back.
        tokens: Number of output tokens so far.
        steps: Number of forwards so far, of every model.
        canvas: Tokens after the committed ones, -1 for a mask; empty unless the request is watched.
    """

    text: str
    tokens: int
    steps: int
    canvas: Sequence[int]


@dataclass(slots=True, eq=False)
class PendingAnswer:
    """A request in progress, and its text so far.

    The driving thread decodes text. Another thread may take `pieces`, if `streams` is set, and the
    output once the job is over.

    Attributes:
        last_sent: Last piece that was part of an event.
        layout: Layout of an infill template, or None.
    """

    detokenizer: Detokenizer
    streams: bool = False
    layout: InfillLayout | None = None
    pieces: deque[TextPiece] = field(default_factory=deque)
    last_sent: TextPiece = TextPiece("", 0, 0, ())
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
            self.append_piece()
        return stopped

    def append_piece(self) -> None:
        """Append a piece with the progress since the previous piece."""
        request = self.job.request
        text = self.detokenizer.take_text(final=request.finish_reason is not None)
        canvas = uncommitted_canvas(request) if self.job.notify_always else ()
        self.pieces.append(TextPiece(text, len(self.detokenizer.ids), len(request.trace), canvas))

    def take_event(self, output: Output | None = None) -> Event:
        """Return all pieces since the previous event as one event."""
        request, before, text = self.job.request, self.last_sent, ""
        while self.pieces:
            self.last_sent = self.pieces.popleft()
            text += self.last_sent.text
        ids = request.tokens[before.tokens : self.last_sent.tokens]
        scores = request.scores[before.tokens : self.last_sent.tokens]
        places = range(len(ids)) if self.suffix is None else self.find_text_places(ids)
        return Event(
            text=text,
            ids=[ids[place] for place in places],
            chosen=self.count_chosen(before.tokens, self.last_sent.tokens),
            logprobs=[scores[place] for place in places] if request.logprobs else None,
            steps=request.trace[before.steps : self.last_sent.steps],
            canvas=self.last_sent.canvas,
            output=output,
            prompt_logprobs=None if before.steps else self.prompt_logprobs,
        )

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
            max_tokens=request.max_tokens,
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
        max_tokens = self.job.request.max_tokens - len(suffix)
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
                if text := self.answer.pieces.popleft().text:
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
