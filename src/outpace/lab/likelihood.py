"""Methods that compute the log-likelihood of a given text instead of generating."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from outpace.api.llm import LLM
from outpace.api.options import Options
from outpace.decoding import CAUSAL_KINDS, FULL, Decoding, Forward, Kind, Prediction, Request
from outpace.decoding.scoring import GivenTokens, score_tokens
from outpace.field_types import check_at_least_one
from outpace.methods import Method


@dataclass(slots=True)
class LikelihoodResult:
    """Log-likelihood of a string, and whether greedy decoding would give it."""

    logprob: float = 0.0
    greedy: bool = True


@dataclass(frozen=True, kw_only=True)
class CausalLikelihood(Method):
    """log p of the tokens after the first `known` tokens of the prompt, in one forward."""

    target_kinds = CAUSAL_KINDS

    known: int
    found: LikelihoodResult = field(default_factory=LikelihoodResult)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(known=self.known)

    def slots_needed(self, prompt: int, max_tokens: int) -> int:
        """Return the number of slots needed: the last token is predicted, not fed."""
        return max(prompt - 1, 1)

    def decode(self, request: Request) -> Decoding:
        """Feed the text and read the log-probabilities of its end."""
        text = request.prompt[self.known :]
        if text:
            out = yield from score_tokens(request.prompt, self.known)
            self.found.logprob = float(sum(out.logprobs or ()))
            self.found.greedy = out.tokens == text
        request.commit([0])


def score_answers(
    llm: LLM, answers: Iterable[tuple[Sequence[int], str]]
) -> tuple[list[float], list[int]]:
    """Return the log-likelihood, in nats, and the number of tokens of each answer to its prompt.

    Args:
        llm: A causal model, which encodes the answers.
        answers: Prompts as tokens of this model, each with the text of an answer.
    """
    codec = llm.text.codec
    assert codec is not None, "prompts were encoded"
    texts = [([*prompt], codec.encode_plain(text)) for prompt, text in answers]
    methods = [CausalLikelihood(known=len(prompt)) for prompt, _ in texts]
    requests = (
        (prompt + answer, Options(method=method, max_tokens=1, temperature=0.0))
        for (prompt, answer), method in zip(texts, methods, strict=True)
    )
    for _ in llm.serve(requests, batch=8):
        pass
    return [method.found.logprob for method in methods], [len(answer) for _, answer in texts]


@dataclass(frozen=True, kw_only=True)
class MonteCarloLikelihood(Method):
    """Lower bound of log p of the tokens after the first `known` ones, from random masks.

    LLaDA's estimate (Nie et al., 2025, equation 6): a uniform number l of the L tokens is masked,
    and the log-probabilities of those are weighted by L / l. The numbers of masks are spread evenly
    over the `draws`, as the authors do. `greedy` is false, since no decoding order is given.
    """

    target_kinds = (Kind.DIFFUSION,)

    known: int
    draws: int = 128
    seed: int = 0
    found: LikelihoodResult = field(default_factory=LikelihoodResult)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(known=self.known, draws=self.draws)

    def decode(self, request: Request) -> Decoding:
        """Repeatedly mask tokens, feed the whole text and read the masked slots."""
        length = len(request.prompt) - self.known
        self.found.greedy = length == 0
        for masked in self.draw_masks(length) if length else ():
            out = yield from score_masked(request, masked, masked)
            weight = length / len(masked) / self.draws
            self.found.logprob += weight * float(sum(out.logprobs or ()))
        request.commit([0])

    def draw_masks(self, length: int) -> Iterator[list[int]]:
        """Yield the masked slots of each draw, in order."""
        random = Random(self.seed)
        first = random.randint(1, length)
        for draw in range(self.draws):
            count = (first - 1 + draw * length // self.draws) % length + 1
            yield [self.known + slot for slot in sorted(random.sample(range(length), count))]


@dataclass(frozen=True, kw_only=True)
class LeftToRightLikelihood(Method):
    """Exact log p of the tokens after the first `known` ones, decoded from left to right.

    The autoregressive law of a masked diffusion model (Israel et al., 2025, equation 4): each token
    is predicted from those before it, with masks in its place and in those after it, in one forward
    of the whole text per token.
    """

    target_kinds = (Kind.DIFFUSION,)

    known: int
    found: LikelihoodResult = field(default_factory=LikelihoodResult)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(known=self.known)

    def decode(self, request: Request) -> Decoding:
        """Feed the text with fewer and fewer masks, and read the first of them."""
        for slot in range(self.known, len(request.prompt)):
            out = yield from score_masked(request, range(slot, len(request.prompt)), [slot])
            self.found.logprob += float(sum(out.logprobs or ()))
            self.found.greedy &= out.tokens == [request.prompt[slot]]
        request.commit([0])


def score_masked(
    request: Request, masked: Sequence[int], slots: Sequence[int]
) -> Generator[Forward, Prediction, Prediction]:
    """Feed the prompt with masked slots; return the prediction of its tokens in `slots`."""
    ids = list(request.prompt)
    for slot in masked:
        ids[slot] = request.target.mask_id
    out = yield Forward(
        ids=ids,
        start=0,
        pattern=FULL,
        predict=slots,
        read=GivenTokens(tokens=[request.prompt[slot] for slot in slots]),
    )
    return out
