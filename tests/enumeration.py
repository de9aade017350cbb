"""Constrained answers of a tiny vocabulary, one by one: what automata are compared with."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

TEXTS = ("a", "b", "c", "ab", "bc", "aa")
SIZE, EOS, HOLE = 8, 6, 7
"""A vocabulary of six texts, an end-of-sequence and a mask."""

PATTERNS = (
    *("a*", "(ab)*c?", "a{3}|b{5}", "(a|b)*abb", "a?b?c?", "(abc|bca){1,2}", "[ab]{2,4}"),
    *("c|ab*", "", "(aa|b)+", "a(bc)*b", "(?:a|aa|aaa)b{2}", "|a|ab|abc|b"),
)


@cache
def answers(pattern: str, room: int) -> list[tuple[int, ...]]:
    """All answers in `room` places: up to an end-of-sequence, or as long as there is room."""
    found: list[tuple[int, ...]] = []
    match = re.compile(pattern).fullmatch
    for length in range(room + 1):
        for tokens in product(range(len(TEXTS)), repeat=length):
            if match("".join([TEXTS[token] for token in tokens])):
                found.append(tokens if length == room else (*tokens, EOS))
    return found


def allowed(found: Sequence[tuple[int | None, ...]], place: int) -> set[int]:
    """Tokens that some completion has at a place."""
    here = {whole[place] for whole in found}
    return set(range(SIZE)) if None in here else {token for token in here if token is not None}


def law(
    found: Sequence[tuple[int | None, ...]], logits: Mapping[int, Tensor]
) -> dict[tuple[int, ...], float]:
    """Probability of each filling of some places, whose logits are `[V]`, given that it fits."""
    fillings = {
        filling
        for whole in found
        for filling in product(
            *(range(SIZE) if whole[place] is None else [whole[place]] for place in logits)
        )
    }
    rows = [row.double().log_softmax(-1).tolist() for row in logits.values()]
    weights = {
        filling: math.exp(sum(row[token] for row, token in zip(rows, filling, strict=True)))
        for filling in fillings
    }
    total = sum(weights.values())
    return {filling: weight / total for filling, weight in weights.items()}


def random_logits(count: int, seed: int) -> Tensor:
    """Logits `[count, V]`; the mask is no token that a model may say."""
    logits = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed)) * 2
    logits[:, HOLE] = -1e30
    return logits
