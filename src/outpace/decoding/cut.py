"""What is left of logits where only the most probable tokens may be drawn.

Shapes: R rows, V vocabulary; settings are tensors `[R]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 16
"""Tokens among which a nucleus mostly lies."""


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Logits `[R, V]` with everything below the k-th largest at minus infinity; ties survive."""
    if bool((top_k >= logits.shape[-1]).all()):
        return logits
    most = min(int(top_k.max()), logits.shape[-1])
    ranked = logits.topk(most, -1).values
    edge = ranked.gather(-1, (top_k.clamp(max=most) - 1)[:, None])
    return logits.masked_fill(logits < edge, -torch.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Logits `[R, V]` with what is too improbable beside the best at minus infinity."""
    if not bool((min_p > 0).any()):
        return logits
    edge = logits.amax(-1, keepdim=True) + min_p[:, None].log()
    return logits.masked_fill(logits < edge, -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Logits `[R, V]` with everything outside the nucleus at minus infinity.

    It mostly lies within the few most probable tokens; only rows where it does not are sorted.
    """
    few = min(FEW, logits.shape[-1])
    edge, full = edges(logits, top_p, few)
    if few < logits.shape[-1] and len(wide := full.nonzero().squeeze(-1)):
        edge[wide] = edges(logits[wide], top_p[wide], logits.shape[-1])[0]
    return logits.masked_fill(logits < edge, -torch.inf)


def edges(logits: Tensor, top_p: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The least logit `[R, 1]` of the nucleus, of `most` tokens, and whether it has all of them."""
    ranked, places = logits.topk(most, -1)
    mass = logits.softmax(-1).gather(-1, places)
    kept = (mass.cumsum(-1) - mass <= top_p[:, None]).sum(-1)
    return ranked.gather(-1, kept.clamp(min=1)[:, None] - 1), kept == most


def nucleus(logits: Tensor, noised: Tensor, top_p: Tensor) -> Tensor:
    """Arg-max of `noised [R, V]` over the nucleus of `logits` (Holtzman et al., 2020), `[R]`.

    A token is in the nucleus unless the tokens that are more probable hold more than `top_p`.
    Nothing is sorted: the best candidate is tried first and nearly always inside; where it is
    not, all tokens that are no more probable are outside too.
    """
    tokens = noised.argmax(-1)
    open_rows = (top_p < 1).nonzero().squeeze(-1)
    probabilities = logits.softmax(-1) if len(open_rows) else logits
    while len(open_rows):
        level = logits[open_rows].gather(-1, tokens[open_rows, None])
        above = torch.where(logits[open_rows] > level, probabilities[open_rows], 0).sum(-1)
        outside = above > top_p[open_rows]
        open_rows, level = open_rows[outside], level[outside]
        left = noised[open_rows].masked_fill(logits[open_rows] <= level, -torch.inf)
        noised = noised.index_copy(0, open_rows, left)
        tokens[open_rows] = left.argmax(-1)
    return tokens
