"""Prompts of a given length, for speed alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from outpace.api.llm import LLM
from outpace.evaluation.question import Question

LENGTH = 128
"""Tokens of a prompt to a model of random weights, unless a length is given."""


def of_length(llm: LLM, questions: Sequence[Question], length: int) -> list[Question]:
    """As many prompts: the tokens of each question and of those behind it, cut to a length.

    They are random tokens where the model has no tokenizer. Nobody judges the answers.
    """
    if llm.text.tokenizer is None:
        prompts = noise(llm, len(questions), length)
    else:
        told = [llm.text.encode(question.prompt, raw=True) for question in questions]
        prompts = [cut(told, number, length) for number in range(len(told))]
    return [Question(prompt, None, "none") for prompt in prompts]


def cut(told: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """So many tokens from one text on, round and round."""
    turned = [*told[first:], *told[:first]]
    again = -(-length // max(sum(map(len, told)), 1))
    return list(islice(chain.from_iterable(turned * again), length))


def noise(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Random tokens, the same each time; neither the mask nor what ends an answer."""
    banned = {*llm.eos, llm.config.mask_id}
    vocab = llm.config.vocab
    plain = next(token for token in range(vocab) if token not in banned)
    drawn = np.random.default_rng(0).integers(vocab, size=(count, length))
    return [[plain if token in banned else token for token in row] for row in drawn.tolist()]
