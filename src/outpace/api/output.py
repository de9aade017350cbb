"""Output of a request, and the answer while it is being generated."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from outpace.api.calls import ToolCall
from outpace.api.display import render_html
from outpace.api.infill import InfillLayout
from outpace.api.parts import (
    PLAIN_FORMAT,
    AnswerFormat,
    AnswerParser,
    assistant_message,
    parse_answer,
)
from outpace.api.text import Detokenizer, TextCodec
from outpace.decoding import Request, Step
from outpace.decoding.logprob import TopTokens, top_tokens
from outpace.decoding.request import FinishReason
from outpace.engine.job import DecodingError, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The finished answer to a prompt.

    A notebook displays its figures, and the tokens of each forward in a different colour.

    Attributes:
        text: The answer with all its parts, without end-of-sequence and cut at a stop string.
        ids: Token ids of the answer.
        finish_reason: `stop` (end-of-sequence, stop id or stop string), `length` or `cancelled`.
        steps: All forward passes, of every model.
        prompt_tokens: Length of the prompt in tokens.
        seconds: Time from the first forward to the last.
        logprobs: If requested, the log-probability of each token under the model's own distribution
            (temperature 1) in the forward that chose it.
        codec: Tokenizer that decodes `ids`; None in copies from another process, and for an infill
            template.
        holes: Text of each hole of an infill template; `text` and `ids` are the whole text.
        given: Number of fixed tokens in `ids`, those of the template.
        format: Format of the parts of `text`.
        stop_string: The stop string that ended the answer, or None.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    steps: list[Step] = field(repr=False)
    prompt_tokens: int
    seconds: float
    logprobs: list[float] | None = None
    codec: TextCodec | None = field(default=None, repr=False, compare=False)
    holes: tuple[str, ...] | None = None
    given: int = 0
    format: AnswerFormat = field(default=PLAIN_FORMAT, repr=False)
    stop_string: str | None = field(default=None, repr=False)

    @property
    def top_logprobs(self) -> list[TopTokens] | None:
        """The most probable tokens of each slot, with their log-probabilities, if requested."""
        return None if self.logprobs is None else [*map(top_tokens, self.logprobs)]

    @property
    def parts(self) -> AnswerParser:
        """The parts of the answer."""
        return parse_answer(self.format, self.text)

    @property
    def reasoning(self) -> str:
        """The thoughts before the answer; empty if there are none."""
        return self.parts.reasoning

    @property
    def content(self) -> str:
        """The text without thoughts and calls of tools."""
        return self.parts.text

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Calls of tools in the answer."""
        return self.parts.calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation; its calls have ids of nine characters."""
        return assistant_message(self.parts, "call{:05}".format)

    @property
    def chosen(self) -> int:
        """Number of tokens in `ids` that the model chose: all except fixed ones."""
        return len(self.ids) - self.given

    @property
    def forwards(self) -> int:
        """Number of forward passes of the target model."""
        return sum(step.model == "target" for step in self.steps)

    @property
    def tokens_per_forward(self) -> float:
        """Chosen tokens per forward pass of the target model."""
        return self.chosen / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Chosen tokens per second from the first forward to the last."""
        return self.chosen / self.seconds if self.seconds else 0.0

    @property
    def figures(self) -> str:
        """One line of decoding statistics."""
        return (
            f"{self.chosen} tokens in {self.forwards} forwards: "
            f"{self.tokens_per_forward:.2f} tokens per forward, "
            f"{self.tokens_per_second:.0f} tokens per second ({self.finish_reason})"
        )

    def pieces(self) -> list[str]:
        """Return the text that each of `steps` committed, in whole characters.

        Returns:
            One string per step, which concatenate to `text`; all text in one string if `codec` is
                None.
        """
        if self.codec is None:
            return [self.text]
        detokenizer, begin, pieces = Detokenizer(self.codec, form=self.format), 0, []
        for step in self.steps:
            detokenizer.push_tokens(self.ids[begin : begin + step.kept])
            begin += step.kept
            pieces.append(detokenizer.take_text(final=begin >= len(self.ids)))
        left = len(self.text)  # a stop string may cut the text within a token
        for place, piece in enumerate(pieces):
            pieces[place] = piece[: max(left, 0)]
            left -= len(piece)
        return pieces

    def _repr_html_(self) -> str:
        """Render the answer for a notebook."""
        return render_html(self.pieces(), self.figures)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the tokenizer, the only field that is not compared."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        return partial(Output, **values), ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Progress of a request since its previous event.

    Attributes:
        text: Committed text of whole characters; empty while it is held back.
        ids: Output tokens.
        chosen: Number of `ids` that the model chose; the others are fixed tokens or padding of an
            infill template.
        logprobs: Log-probabilities of `ids`, if requested.
        steps: Forwards, of every model.
        canvas: Tokens after the committed ones, -1 for a mask; only if the request is watched and
            its method fills out of order.
        output: The finished output, in the last event.
    """

    text: str
    ids: Sequence[int]
    chosen: int
    logprobs: Sequence[float] | None
    steps: Sequence[Step]
    canvas: Sequence[int]
    output: Output | None


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

    def decode_tokens(self, request: Request) -> bool:
        """Decode new tokens; returns True if a stop string ends the answer."""
        # Counted by the decoded tokens, so Ctrl-C while one is decoded loses none after it.
        begin = len(request.prompt) + len(self.detokenizer.ids)
        stopped = self.detokenizer.push_tokens(request.ids[begin:])
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
        tokens = slice(before.tokens, self.last_sent.tokens)
        return Event(
            text=text,
            ids=request.tokens[tokens],
            chosen=self.count_chosen(before.tokens, self.last_sent.tokens),
            logprobs=request.scores[tokens] if request.logprobs else None,
            steps=request.trace[before.steps : self.last_sent.steps],
            canvas=self.last_sent.canvas,
            output=output,
        )

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
        if self.layout is not None:
            return self.build_infill_output(self.layout)
        self.decode_tokens(request)
        detokenizer.take_text(final=True)
        return Output(
            text=detokenizer.text,
            ids=detokenizer.ids,
            finish_reason="stop" if detokenizer.stopped else request.finish_reason,
            steps=request.trace,
            prompt_tokens=len(request.prompt),
            seconds=self.job.ended - self.job.began,
            logprobs=request.scores[: len(detokenizer.ids)] if request.logprobs else None,
            codec=detokenizer.codec,
            format=self.format,
            stop_string=detokenizer.stop_string,
        )

    def build_infill_output(self, layout: InfillLayout) -> Output:
        """Return the output of an infill template; raises `DecodingError` if a hole is unfilled."""
        request = self.job.request
        assert request.finish_reason is not None
        if len(request) < request.limit:
            raise DecodingError(
                f"{self.job.method!r} left holes unfilled from slot {len(request)} on "
                f"({request.finish_reason})"
            )
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
            holes=filled.holes,
            given=filled.given,
        )


def uncommitted_canvas(request: Request) -> list[int]:
    """Return the canvas after the committed tokens of a running request; -1 for a mask."""
    if request.finish_reason is not None:
        return []
    mask = request.target.mask_id
    return [-1 if token == mask else token for token in request.canvas[len(request) :]]


def count_reasoning_tokens(text: TextCodec, output: Output) -> int:
    """Return the number of tokens of an answer up to the end of its thoughts."""
    if output.format.thoughts is None or not output.reasoning:
        return 0

    def has_ended(count: int) -> bool:
        detokenizer = Detokenizer(text, form=output.format)
        detokenizer.push_tokens(output.ids[:count])
        parts = AnswerParser(output.format)
        parts.feed(detokenizer.take_text(final=True))
        assert parts.thoughts is not None
        return parts.thoughts.has_ended

    return bisect_left(range(len(output.ids)), True, key=has_ended)


def merge_events(events: Sequence[Event]) -> Event:
    """Merge consecutive events into one."""
    scored = events[0].logprobs is not None
    return Event(
        text="".join(event.text for event in events),
        ids=[token for event in events for token in event.ids],
        chosen=sum(event.chosen for event in events),
        logprobs=[score for event in events for score in event.logprobs or ()] if scored else None,
        steps=[step for event in events for step in event.steps],
        canvas=events[-1].canvas,
        output=events[-1].output,
    )
