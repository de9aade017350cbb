"""Log-probabilities of given tokens, read from one forward."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from outpace.decoding.forward import Decoding, Forward, Prediction
from outpace.decoding.processor import TokenLogprob, top_tokens
from outpace.decoding.request import Request
from outpace.decoding.sampling import GroupReader, Read, Readout, Score, argmax_tokens


@dataclass(frozen=True, kw_only=True)
class GivenTokens(Read):
    """Read the most probable tokens, and the log-probabilities of given tokens.

    Scores are `logprob` and `rank`: 1 for the most probable token.
    """

    tokens: Sequence[int]
    scores: tuple[Score, ...] = ("logprob",)
    top_logprobs: int | None = 0
    is_given: bool = True

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        tokens = torch.tensor([token for read in reads for token in read.tokens], device=device)
        has_ranks = any("rank" in read.scores for read in reads)

        def read(logits: Tensor, rows: slice) -> Readout:
            logits = logits.float()
            given = tokens[rows, None]
            scores: dict[Score, Tensor] = {
                "logprob": logits.log_softmax(-1).gather(-1, given).squeeze(-1)
            }
            if has_ranks:
                scores["rank"] = 1 + (logits > logits.gather(-1, given)).sum(-1)
            return Readout(argmax_tokens(logits), scores)

        return read


def score_tokens(
    ids: Sequence[int],
    known: int,
    scores: tuple[Score, ...] = ("logprob",),
    top_logprobs: int = 0,
    *,
    start: int = 0,
) -> Generator[Forward, Prediction, Prediction]:
    """Feed a text to a causal model; return the prediction of the tokens after the `known` ones.

    The model has already read the first `start` tokens.
    """
    out = yield Forward(
        ids=ids[start:-1],
        start=start,
        predict=range(known, len(ids)),
        read=GivenTokens(tokens=ids[known:], scores=scores, top_logprobs=top_logprobs),
    )
    return out


def score_prompt(request: Request, decoding: Decoding) -> Decoding:
    """Score the tokens of a prompt after the first, then decode its answer, if it has one."""
    # The forward has the memory of the request, so the method may start at slot 0 as usual.
    if len(request.prompt) > 1:
        scores: tuple[Score, ...] = ("logprob", "rank")
        out = yield from score_tokens(request.prompt, 1, scores, request.prompt_logprobs or 0)
        found = zip(out.logprobs or (), out.scores["rank"].tolist(), strict=True)
        request.prompt_scores = [
            TokenLogprob(score, top_tokens(score), int(rank)) for score, rank in found
        ]
    if request.max_tokens:
        yield from decoding
    else:
        request.finish_reason = "length"


def score_choices(request: Request, decoding: Decoding) -> Decoding:
    """Score each choice after the prompt, which is fed once, then decode the answer."""
    known, start = len(request.prompt), 0
    for text, ids in request.choices.items():
        score = 0.0
        if ids:
            out = yield from score_tokens([*request.prompt, *ids], known, start=start)
            start, score = known - 1, float(sum(out.logprobs or ()))
        request.choice_scores[text] = score
    yield from decoding
