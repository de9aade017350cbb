"""What becomes of a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from outpace.api.display import coloured
from outpace.api.infill import Layout
from outpace.api.text import Detokenizer, Text
from outpace.decoding import Request, Step
from outpace.decoding.request import FinishReason
from outpace.engine.job import DecodingError, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What became of a prompt.

    Attributes:
        text: the answer, without end-of-sequence and cut at a stop string.
        ids: its tokens.
        finish_reason: `stop` (end-of-sequence, stop id or stop string), `length` or `cancelled`.
        steps: every forward pass, of every model.
        prompt_tokens: length of the prompt.
        seconds: from the first forward to the last.
        logprobs: where they were asked for, the log-probability of each token, under the model's
            own distribution (temperature 1) in the forward that chose it.
        speech: what its tokens say; None where nobody knows, as in a copy from another process,
            and for a cloze.
        holes: the text of each hole of a cloze, which `text` and `ids` have whole.
        given: tokens of `ids` that nobody had to choose.

    A notebook shows it coloured by forward, with its figures.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    steps: list[Step] = field(repr=False)
    prompt_tokens: int
    seconds: float
    logprobs: list[float] | None = None
    speech: Text | None = field(default=None, repr=False, compare=False)
    holes: tuple[str, ...] | None = None
    given: int = 0

    @property
    def chosen(self) -> int:
        """Tokens of `ids` that the model chose: all but those that were given."""
        return len(self.ids) - self.given

    @property
    def forwards(self) -> int:
        """Forward passes of the target model."""
        return sum(step.model == "target" for step in self.steps)

    @property
    def tokens_per_forward(self) -> float:
        """Chosen tokens for each forward pass of the target model."""
        return self.chosen / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Chosen tokens for each second that the request ran."""
        return self.chosen / self.seconds if self.seconds else 0.0

    @property
    def figures(self) -> str:
        """One line about how it was decoded."""
        return (
            f"{self.chosen} tokens in {self.forwards} forwards: "
            f"{self.tokens_per_forward:.2f} tokens per forward, "
            f"{self.tokens_per_second:.0f} tokens per second ({self.finish_reason})"
        )

    def pieces(self) -> list[str]:
        """Text that each of `steps` brought, whole characters; all in one where `speech` is None.

        Together they are `text`.
        """
        if self.speech is None:
            return [self.text]
        detokenizer, begin, pieces = Detokenizer(self.speech), 0, []
        for step in self.steps:
            detokenizer.push(self.ids[begin : begin + step.kept])
            begin += step.kept
            pieces.append(detokenizer.take(final=begin >= len(self.ids)))
        left = len(self.text)  # a stop string cuts the text within a token
        for place, piece in enumerate(pieces):
            pieces[place] = piece[: max(left, 0)]
            left -= len(piece)
        return pieces

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return coloured(self.pieces(), self.figures)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles leave the tokenizer behind."""
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        return partial(Output, **{**kept, "speech": None}), ()


class Piece(NamedTuple):
    """What a forward brought: text, and how far tokens and forwards have come.

    Attributes:
        text: committed text, whole characters; empty where it is held back.
        tokens: number of output tokens so far.
        steps: number of forwards so far, of every model.
        canvas: what lies behind the tokens, -1 for a hole, where somebody watches.
    """

    text: str
    tokens: int
    steps: int
    canvas: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What has come of a request since the event before.

    Attributes:
        text: committed text, whole characters; empty where it is held back.
        ids: output tokens.
        chosen: how many of them the model chose: in a cloze, others are given, or padding.
        logprobs: of these tokens, where they were asked for.
        steps: forwards, of every model.
        canvas: where the request is watched and its method fills out of order, the tokens that lie
            behind those committed, -1 for a hole.
        output: what became of it, with the last event.
    """

    text: str
    ids: Sequence[int]
    chosen: int
    logprobs: Sequence[float] | None
    steps: Sequence[Step]
    canvas: Sequence[int]
    output: Output | None


@dataclass(slots=True, eq=False)
class Answer:
    """A request on its way and the text that it has so far.

    Text is decoded by the thread that drives. Another one may take `pieces`, which there are where
    somebody `streams`, and the `output` once the job is over. `seen` is the last piece that an
    event had, and `layout` is that of a cloze.
    """

    detokenizer: Detokenizer
    streams: bool = False
    layout: Layout | None = None
    pieces: deque[Piece] = field(default_factory=deque)
    seen: Piece = Piece("", 0, 0, ())
    job: Job = field(init=False)

    def push(self, request: Request) -> bool:
        """Decode the tokens that are new; True where a stop string ends the answer."""
        # Counted by what has arrived, so that Ctrl-C while one is decoded loses none behind it.
        known = len(request.prompt) + len(self.detokenizer.ids)
        stopped = self.detokenizer.push(request.ids[known:])
        if self.streams:
            self.take()
        return stopped

    def take(self) -> None:
        """Make a piece of what has come since the piece before."""
        request = self.job.request
        text = self.detokenizer.take(final=request.finish_reason is not None)
        canvas = behind(request) if self.job.watched else ()
        self.pieces.append(Piece(text, len(self.detokenizer.ids), len(request.trace), canvas))

    def event(self, output: Output | None = None) -> Event:
        """All pieces since the event before, as one; with its output, once it is over."""
        request, before, text = self.job.request, self.seen, ""
        while self.pieces:
            self.seen = self.pieces.popleft()
            text += self.seen.text
        tokens = slice(before.tokens, self.seen.tokens)
        return Event(
            text=text,
            ids=request.tokens[tokens],
            chosen=self.chosen(before.tokens, self.seen.tokens),
            logprobs=request.scores[tokens] if request.logprobs else None,
            steps=request.trace[before.steps : self.seen.steps],
            canvas=self.seen.canvas,
            output=output,
        )

    def chosen(self, begin: int, end: int) -> int:
        """How many of its tokens from `begin` to `end` the model chose, and are no padding."""
        layout, tokens = self.layout, self.job.request.tokens[begin:end]
        if layout is None:
            return len(tokens)
        slots = enumerate(tokens, len(layout.prompt) + begin)
        return sum(slot not in layout.given and token not in layout.ends for slot, token in slots)

    def output(self) -> Output:
        """What became of it, once it has ended; raises what its method raised."""
        if self.job.error is not None:
            raise self.job.error
        request, detokenizer = self.job.request, self.detokenizer
        assert request.finish_reason is not None
        if self.layout is not None:
            return self.filled(self.layout)
        self.push(request)
        detokenizer.take(final=True)
        return Output(
            text=detokenizer.text,
            ids=detokenizer.ids,
            finish_reason="stop" if detokenizer.stopped else request.finish_reason,
            steps=request.trace,
            prompt_tokens=len(request.prompt),
            seconds=self.job.ended - self.job.began,
            logprobs=request.scores[: len(detokenizer.ids)] if request.logprobs else None,
            speech=detokenizer.speech,
        )

    def filled(self, layout: Layout) -> Output:
        """What became of a cloze; `DecodingError` where a hole was left."""
        request = self.job.request
        assert request.finish_reason is not None
        if len(request) < request.limit:
            raise DecodingError(
                f"{self.job.method!r} left the cloze open from slot {len(request)} on "
                f"({request.finish_reason})"
            )
        filled, tokens = layout.read(request.tokens), request.tokens
        lead = len(request.prompt) - layout.lead
        scores = None
        if request.logprobs:
            scores = [0.0] * layout.lead + [request.scores[place] for place in filled.kept]
        return Output(
            text=filled.text,
            ids=request.prompt[lead:] + [tokens[place] for place in filled.kept],
            finish_reason=request.finish_reason,
            steps=request.trace,
            prompt_tokens=lead,
            seconds=self.job.ended - self.job.began,
            logprobs=scores,
            holes=filled.holes,
            given=filled.given,
        )


def behind(request: Request) -> list[int]:
    """What a canvas has behind the tokens of a request that goes on; -1 for a hole."""
    if request.finish_reason is not None:
        return []
    mask = request.target.mask_id
    return [-1 if token == mask else token for token in request.canvas[len(request) :]]
