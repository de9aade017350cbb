"""Prompts in answers: their text before the answer, and the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from outpace.api.output import Event, Output
from outpace.decoding.logprob import TokenLogprob
from outpace.server.models import HostedModel

Answer = TypeVar("Answer", Output, Event)


class PromptEcho(NamedTuple):
    """A prompt that precedes its answer: its text and its token ids."""

    text: str
    ids: Sequence[int]

    def prepend_to(self, answer: Answer) -> Answer:
        """Return an answer, or its first event, after the prompt.

        Log-probabilities begin with those of the prompt, if the answer has any. That of the first
        token is None.
        """
        changes: dict[str, Any] = {"text": self.text + answer.text}
        scores = answer.prompt_logprobs
        if scores is not None and answer.logprobs is not None:
            changes["ids"] = [*self.ids, *answer.ids]
            changes["logprobs"] = join_scores(scores, answer.logprobs)
        return replace(answer, **changes)


def join_scores(prompt: Sequence[float | None], answer: Sequence[float]) -> Sequence[float | None]:
    """Return the log-probabilities of a prompt and of its answer."""
    return [*prompt, *answer]


def format_prompt_logprobs(
    model: HostedModel, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt in vLLM's form.

    Each token has an object of log-probability, rank and text by token id: of the most probable
    tokens and of the token itself. The first token has None.
    """
    found: list[dict[str, Any] | None] = []
    for token, score in zip(ids, logprobs, strict=True):
        if score is None:
            found.append(None)
            continue
        ranked = [(each, value, rank) for rank, (each, value) in enumerate(score.top, 1)]
        if token not in {each for each, _, _ in ranked}:
            ranked.append((token, float(score), score.rank or 0))
        found.append(
            {
                str(each): {"logprob": value, "rank": rank, "decoded_token": model.token_text(each)}
                for each, value, rank in ranked
            }
        )
    return found
