"""Output of a request, and its progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from html import escape
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from outpace.api.detokenizer import Detokenizer
from outpace.api.parts import PLAIN_FORMAT, AnswerFormat, AnswerParts, PartsDelta, assistant_message
from outpace.api.text import TextCodec
from outpace.constraint.calls import ToolCall
from outpace.decoding import Step
from outpace.decoding.forward import IntArray
from outpace.decoding.processor import TokenLogprob, TopTokens, top_tokens
from outpace.decoding.request import FinishReason

DRAFT_COUNTS = ("draft_tokens", "accepted_tokens", "draft_forwards")
"""Names of the counts of drafts, in Python and JSON."""

PIECE_HUES = (200, 45, 310, 130, 20)
"""Hues of successive forwards, in degrees; neighbours differ."""
TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
PIECE_STYLE = "background:hsla({hue},90%,50%,.28);border-bottom:2px solid hsl({hue},70%,50%)"
FIGURES_STYLE = "opacity:.75;font-size:.9em;margin-top:.4em"


def render_html(pieces: Sequence[str], figures: str) -> str:
    """Render pieces of text, one colour per non-empty piece, above a line of figures.

    All model output is escaped. Styles are inline and translucent: notebooks drop style sheets and
    have their own themes.
    """
    shown = [piece for piece in pieces if piece]
    spans = "".join(
        f'<span title="forward {number} of {len(shown)} that committed text" '
        f'style="{PIECE_STYLE.format(hue=PIECE_HUES[number % len(PIECE_HUES)])}">'
        f"{escape(piece)}</span>"
        for number, piece in enumerate(shown, 1)
    )
    return (
        f'<div><div style="{TEXT_STYLE}">{spans}</div>'
        f'<div style="{FIGURES_STYLE}">{escape(figures)}</div></div>'
    )


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
        prompt_logprobs: If requested, those of the prompt's tokens, with `top` and `rank`; None for
            the first token, which nothing precedes.
        choice_logprobs: If requested, the log-probability of each choice after the prompt, the sum
            of those of its tokens.
        codec: Tokenizer that decodes `ids`; None in copies from another process, and for an infill
            template.
        holes: Text of each hole of an infill template; `text` and `ids` are the whole text.
        given: Number of fixed tokens in `ids`, those of the template.
        suffix_tokens: Number of tokens of a suffix that the answer was infilled before.
        format: Format of the parts of `text`.
        stop_string: The stop string that ended the answer, or None.
        max_tokens: Maximum number of tokens of the answer; None for an infill template.
        parsed: Parts of `text`; None if it has no others.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    steps: list[Step] = field(repr=False)
    prompt_tokens: int
    seconds: float
    logprobs: list[float] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    choice_logprobs: dict[str, float] | None = None
    codec: TextCodec | None = field(default=None, repr=False, compare=False)
    holes: tuple[str, ...] | None = None
    given: int = 0
    suffix_tokens: int = 0
    format: AnswerFormat = field(default=PLAIN_FORMAT, repr=False)
    stop_string: str | None = field(default=None, repr=False)
    max_tokens: int | None = field(default=None, repr=False)
    parsed: AnswerParts | None = field(default=None, repr=False)

    @property
    def top_logprobs(self) -> list[TopTokens] | None:
        """The most probable tokens of each slot, with their log-probabilities, if requested."""
        return None if self.logprobs is None else [*map(top_tokens, self.logprobs)]

    @property
    def parts(self) -> AnswerParts:
        """The parts of the answer."""
        return self.parsed or AnswerParts("", self.text, [])

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
    def input_tokens(self) -> int:
        """Number of tokens that the request contained: prompt, template and suffix."""
        return self.prompt_tokens + self.given + self.suffix_tokens

    @property
    def chosen(self) -> int:
        """Number of tokens in `ids` that the model chose: all except fixed ones."""
        return len(self.ids) - self.given

    @property
    def forwards(self) -> int:
        """Number of forward passes of the target model."""
        return sum(step.model == "target" for step in self.steps)

    @property
    def draft_forwards(self) -> int:
        """Number of forward passes of the draft or verifier."""
        return len(self.steps) - self.forwards

    @property
    def verifications(self) -> list[tuple[int, int]]:
        """Draft tokens of each forward that verified some, and the number of them in `ids`."""
        counts, left = [], len(self.ids)
        for step in self.steps:
            committed = min(step.committed, left)  # a stop string may drop the end of a draft
            left -= committed
            if step.drafted:
                own = step.model == "verifier"  # the target's first token, which is no draft
                counts.append((step.drafted, max(min(step.accepted, committed - own), 0)))
        return counts

    @property
    def draft_tokens(self) -> int:
        """Number of draft tokens that were verified: proposals, copies and forced tokens."""
        return sum(drafted for drafted, _ in self.verifications)

    @property
    def accepted_tokens(self) -> int:
        """Number of verified draft tokens that are part of the answer."""
        return sum(accepted for _, accepted in self.verifications)

    @property
    def drafting_off(self) -> Literal["pace"] | None:
        """What switched drafting off for the whole request, if anything is known to have."""
        lengths = [step.draft_length for step in self.steps if step.draft_length is not None]
        # A single one may be due to the limit, before which no draft fits.
        return "pace" if len(lengths) > 1 and {*lengths} == {1} else None

    @property
    def draft_figures(self) -> dict[str, Any]:
        """Statistics of drafts as JSON fields; empty without drafts and without a reason."""
        figures = {name: getattr(self, name) for name in DRAFT_COUNTS}
        off = {} if self.drafting_off is None else {"drafting_off": self.drafting_off}
        return (figures if any(figures.values()) else {}) | off

    @property
    def tokens_per_forward(self) -> float:
        """Chosen tokens per forward pass of the target model."""
        return self.chosen / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Chosen tokens per second from the first forward to the last."""
        return self.chosen / self.seconds if self.seconds else 0.0

    @property
    def prompt_step(self) -> Step | None:
        """The forward that read the prompt; None if the request ended before it."""
        return next((step for step in self.steps if step.model == "target"), None)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of the prompt that the prefix cache held."""
        return 0 if self.prompt_step is None else self.prompt_step.cached

    @property
    def has_prefill(self) -> bool:
        """Whether the first forward only reads the prompt: it has no holes."""
        return self.holes is None and bool(self.steps) and not self.steps[0].holes

    @property
    def tokens_after_prefill(self) -> int:
        """Tokens after the prompt's forward, with an end that took a forward alone."""
        begin = [number for number, step in enumerate(self.steps) if step.model == "target"][1:2]
        first = sum(step.committed for step in self.steps[: begin[0] if begin else None])
        has_end = self.finish_reason == "stop" and not self.steps[-1].committed
        return max(self.chosen - first, 0) + has_end

    @property
    def figures(self) -> str:
        """One line of decoding statistics; it counts the prompt's forward and its token apart."""
        forwards, rate = f"{self.forwards} forwards", self.tokens_per_forward
        if self.has_prefill and self.forwards > 1:
            forwards = f"{self.forwards - 1} forwards after the prompt's"
            rate = self.tokens_after_prefill / (self.forwards - 1)
        return (
            f"{self.chosen} tokens in {forwards}: {rate:.2f} tokens per forward, "
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
            detokenizer.push_tokens(self.ids[begin : begin + step.committed])
            begin += step.committed
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


STEP_VALUES = attrgetter(*Step.__slots__)


def step_record(step: Step) -> dict[str, Any]:
    """Return a step of a trace as JSON fields."""
    values = dict(zip(Step.__slots__, STEP_VALUES(step), strict=True))
    return values | {"holes": [[run.start, run.stop] for run in step.holes]}


def step_from_record(record: Mapping[str, Any]) -> Step:
    """Return the step of JSON fields."""
    pattern, holes = record["pattern"], tuple(range(*run) for run in record["holes"])
    pattern = tuple(pattern) if isinstance(pattern, list) else pattern
    return Step(**{**record, "pattern": pattern, "holes": holes})


class PromptProgress(NamedTuple):
    """How much of a prompt has been read, as llama.cpp reports it.

    Attributes:
        total: Number of tokens of the prompt.
        cache: Number of those that the prefix cache held.
        processed: Number of tokens read so far, with those of the cache.
        time_ms: Milliseconds since reading began.
    """

    total: int
    cache: int
    processed: int
    time_ms: int


@dataclass(slots=True, kw_only=True)
class Event:
    """Progress of a request since its previous event. The first only admits the request.

    Attributes:
        number: Number of the request.
        text: Committed text of whole characters; empty while it is held back.
        parts: New characters of its parts.
        ids: Output tokens.
        chosen: Number of `ids` that the model chose; the others are fixed tokens or padding of an
            infill template.
        logprobs: Log-probabilities of `ids`, if requested.
        prompt_logprobs: In the first event, those of the prompt, if requested.
        steps: Forwards, of every model.
        canvas: Tokens after the committed ones, -1 for a mask; only if the request is watched and
            its method fills out of order.
        progress: How much of the prompt has been read, if more than before; such an event may hold
            nothing else.
        output: The finished output, in the last event.
        error: Error that ended the request.
    """

    number: int
    text: str = ""
    parts: PartsDelta = PartsDelta()
    ids: list[int] = field(default_factory=list)
    chosen: int = 0
    logprobs: list[float] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    steps: list[Step] = field(default_factory=list)
    canvas: Sequence[int] = ()
    progress: PromptProgress | None = None
    output: Output | None = None
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        """Whether no more events follow."""
        return self.error is not None or self.output is not None

    def extend(self, later: Event) -> None:
        """Add the progress of the next event."""
        self.text += later.text
        self.parts = self.parts.extend(later.parts)
        self.ids += later.ids
        self.chosen += later.chosen
        if later.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.progress = later.progress or self.progress
        self.steps += later.steps
        self.canvas, self.output = later.canvas, later.output

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle steps as tuples, which takes an eighth of the time."""
        return event_from_values, ([*map(STEP_VALUES, self.steps)], EVENT_VALUES(self))


EVENT_FIELDS = tuple(name for name in Event.__slots__ if name != "steps")
EVENT_VALUES = attrgetter(*EVENT_FIELDS)


def event_from_values(steps: list[tuple[Any, ...]], values: tuple[Any, ...]) -> Event:
    """Return a pickled event."""
    return Event(
        steps=[Step(*each) for each in steps], **dict(zip(EVENT_FIELDS, values, strict=True))
    )


def count_reasoning_tokens(text: TextCodec, output: Output) -> int:
    """Return the number of tokens of an answer up to the end of its thoughts."""
    form = output.format.thoughts
    if form is None or not output.reasoning:
        return 0
    at = output.text.find(form.end, len(form.begin))
    detokenizer = Detokenizer(text, form=output.format)
    for count, token in enumerate(output.ids, 1):
        detokenizer.push_tokens([token])
        if at >= 0 and len(detokenizer.text) >= at + len(form.end):
            return count
    return len(output.ids)


STATE_ABSENT, STATE_HOLE, STATE_FILLED, STATE_FULL, STATE_CACHED = range(5)
STATE_NAMES = ("absent", "hole", "filled by this forward", "filled before", "cached")
"""Descriptions of the states."""


def target_steps(output: Output) -> list[Step]:
    """Return the forwards of the target."""
    return [step for step in output.steps if step.model == "target"]


def is_scattered(output: Output) -> bool:
    """Return whether a forward ran in blocks, or had filled slots between mask positions."""
    return any(isinstance(step.pattern, tuple) or len(step.holes) > 1 for step in output.steps)


def block_edges(output: Output) -> list[int]:
    """Return the ends of all blocks, as slots of the answer."""
    patterns = ((step.start, step.pattern) for step in target_steps(output))
    ends = {
        start + end - output.prompt_tokens
        for start, pattern in patterns
        if not isinstance(pattern, str)
        for end in accumulate(pattern)
    }
    return sorted(end for end in ends if end > 0)


def slot_states(output: Output) -> IntArray:
    """Return the state of each slot of the answer in each forward of the target.

    A slot is filled by the last forward that had a mask token there. If no forward had one, the
    forward that committed its token filled it.

    Returns:
        Indices into `STATE_NAMES`, `[forwards, slots]`.
    """
    steps, first = target_steps(output), output.prompt_tokens
    kept = sum(step.committed for step in output.steps)
    # Tree nodes occupy slots, but not all of them end up in the text.
    ends = (step.start + step.rows for step in steps if step.pattern != "tree")
    size = max([kept, *(end - first for end in ends)])
    states = np.full((len(steps), size), STATE_ABSENT)
    filled = np.full(size, len(steps))
    for row, step in enumerate(steps):
        for run in step.holes:
            states[row, run.start - first : run.stop - first] = STATE_HOLE
            filled[run.start - first : run.stop - first] = row
    begin, row = 0, -1
    for step in output.steps:
        row += step.model == "target"
        end = begin + step.committed
        filled[begin:end] = np.minimum(filled[begin:end], row)
        begin = end
    # A slot that was neither committed nor a real token of a forward was never filled. A slot
    # that is in no later forward and was not committed was dropped.
    token, there = np.arange(size) < kept, np.arange(size) < kept
    for row in reversed(range(len(steps))):
        begin = max(steps[row].start - first, 0)
        end = max(steps[row].start + steps[row].rows - first, 0)
        there[begin:end] = True
        token[begin:end] |= states[row, begin:end] != STATE_HOLE
        states[row, token & (filled == row)] = STATE_FILLED
        states[row, token & (filled < row) & there] = STATE_FULL
        states[row, :begin] = STATE_CACHED
    return states
