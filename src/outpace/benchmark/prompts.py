"""Prompts of a given length, for speed measurements without accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from outpace.api.llm import LLM
from outpace.evaluation.question import Question

DEFAULT_PROMPT_LENGTH = 128
"""Default tokens of a prompt to a model with random weights."""


def prompts_of_length(llm: LLM, questions: Sequence[Question], length: int) -> list[Question]:
    """Return a prompt of `length` tokens per question, to be answered without scoring.

    A prompt is the question's tokens followed by those of the next questions, truncated. If the
    model has no tokenizer, prompts are random tokens.
    """
    if llm.text.tokenizer is None:
        prompts = random_prompts(llm, len(questions), length)
    else:
        texts = [llm.text.encode(question.prompt, raw=True) for question in questions]
        prompts = [cut_prompt(texts, number, length) for number in range(len(texts))]
    return [Question(prompt, None, "none") for prompt in prompts]


def cut_prompt(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """Return `length` tokens of the texts, starting with text `first`, repeated as needed."""
    rotated = [*texts[first:], *texts[:first]]
    repeats = -(-length // max(sum(map(len, texts)), 1))
    return list(islice(chain.from_iterable(rotated * repeats), length))


def random_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Return reproducible random tokens, without mask and end tokens."""
    banned = {*llm.eos, llm.config.mask_id}
    vocab = llm.config.vocab
    substitute = next(token for token in range(vocab) if token not in banned)
    drawn = np.random.default_rng(0).integers(vocab, size=(count, length))
    return [[substitute if token in banned else token for token in row] for row in drawn.tolist()]
