"""Every method as a plain loop at temperature 0, straight from its paper.

No forwards, reads, pages or batches: a canvas, a model called on rows, and keys and values held in
a list where a method keeps them. What `outpace.methods` must equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from helpers import whole
from outpace.models.transformer import Transformer


def autoregressive(
    model: Transformer, prompt: list[int], max_tokens: int, eos: int | None = None
) -> list[int]:
    """The next token of everything so far, again and again."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        logits = whole(model, ids, causal=True)[-1].clone()
        if model.config.mask_id is not None:
            logits[model.config.mask_id] = -torch.inf
        token = int(logits.argmax())
        if token == eos:
            break
        ids.append(token)
    return ids[len(prompt) :]


class Kept:
    """Keys and values of a canvas as of the last time that each of its tokens was fed."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * model.config.layers

    @torch.inference_mode()
    def logits(self, canvas: list[int], left: int) -> Tensor:
        """Feed `canvas[left:]`, each seeing all of it; raw logits of the rows, mask never said."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if (held := self.layers[layer]) is not None:
                k, v = (torch.cat((old[:left], new)) for old, new in zip(held, (k, v), strict=True))
            self.layers[layer] = k, v
            share = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            weights = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
            return torch.einsum("hqk,khd->qhd", weights.softmax(-1), v)

        positions = torch.arange(left, len(canvas))
        logits = self.model.head(self.model(torch.tensor(canvas[left:]), positions, attend))
        assert self.model.config.mask_id is not None
        logits[:, self.model.config.mask_id] = -torch.inf
        return logits


def left_edge(window: int | None, before: int | None) -> int:
    """First token fed again: `window - 1` older ones than those of the last turn."""
    return 0 if window is None or before is None else max(before - window + 1, 0)


def left_to_right(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    tokens: int = 1,
    window: int | None = None,
    lookahead: int | None = None,
    eos: int | None = None,
) -> list[int]:
    """Show the masks that are left, or the next few, and take the first of them."""
    ids, kept, before = list(prompt), Kept(model), None
    limit = len(prompt) + max_tokens
    while len(ids) < limit:
        n = len(ids)
        end = limit if lookahead is None else min(n + lookahead, limit)
        left = left_edge(window, before)
        logits = kept.logits(ids + [model.config.mask_id] * (end - n), left)
        for row in range(n - 1, min(n - 1 + tokens, end - 1)):
            token = int(logits[row - left].argmax())
            if token == eos:
                return ids[len(prompt) :]
            ids.append(token)
        before = n
    return ids[len(prompt) :]


def apd(
    model: Transformer,
    verifier: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    ratio: float,
    window: int | None = None,
    lookahead: int | None = None,
    eos: int | None = None,
) -> list[int]:
    """Take the guesses up to the first on which model and verifier together say otherwise."""
    ids, kept, before = list(prompt), Kept(model), None
    limit = len(prompt) + max_tokens
    while len(ids) < limit:
        n = len(ids)
        end = limit if lookahead is None else min(n + lookahead, limit)
        left = left_edge(window, before)
        logits = kept.logits(ids + [model.config.mask_id] * (end - n), left)
        marginals = logits[n - 1 - left : end - 1 - left]
        guesses = marginals.argmax(-1).tolist()
        checked = whole(verifier, ids + guesses, causal=True)[n - 1 : end - 1]
        vocab = min(marginals.shape[-1], checked.shape[-1])
        # Minus infinity is no number to be weighed: the mask is never said at any ratio.
        marginals = marginals[:, :vocab].clamp(min=-1e30)
        mixed = ratio * marginals + (1 - ratio) * checked[:, :vocab]
        if model.config.mask_id < vocab:
            mixed[:, model.config.mask_id] = -torch.inf
        for index, (guess, row) in enumerate(zip(guesses, mixed, strict=True)):
            if index and guess != int(row.argmax()):
                break
            if guess == eos:
                return ids[len(prompt) :]
            ids.append(guess)
        before = n
    return ids[len(prompt) :]


def row_by_row(model: Transformer, ids: list[int], places: list[int]) -> Tensor:
    """Logits of rows that see the rows before them, at positions of their own; mask never said."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        weights = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(len(ids), len(ids)).triu(1).bool()
        return torch.einsum("hqk,khd->qhd", weights.masked_fill(later, -torch.inf).softmax(-1), v)

    with torch.inference_mode():
        logits = model.head(model(torch.tensor(ids), torch.tensor(places), attend))
        logits[:, model.config.mask_id] = -torch.inf
    return logits


def wedlm(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    window: int,
    entropy: float | None = 0.4,
    penalty: float = 0.02,
    confidence: float | None = None,
    block: bool = False,
    clip: bool = False,
    eos: int | None = None,
) -> list[int]:
    """Everything again in every turn, known tokens first; fill the masks in little doubt."""
    known = dict(enumerate(prompt))
    limit, masks = len(prompt) + max_tokens, []
    while True:
        prefix = next(place for place in range(len(known) + 1) if place not in known)
        for place in range(len(prompt), prefix):
            if known[place] == eos or place == limit:
                return [known[p] for p in range(len(prompt), place)]
        if prefix >= limit:
            return [known[p] for p in range(len(prompt), limit)]
        if not (block and masks):
            end = min(prefix + window, limit) if clip else prefix + window
            masks = [place for place in range(prefix, end) if place not in known]
        order = [*sorted(known), *masks]
        ids = [known.get(place, model.config.mask_id) for place in order]
        chances = row_by_row(model, ids, order)[len(known) :].softmax(-1)
        best = chances.max(-1)
        doubts = torch.special.entr(chances).sum(-1)
        doubts += penalty * (torch.tensor(masks) - masks[0])
        if confidence is None:
            sure, least = doubts < (entropy or 0), int(doubts.argmin())
        else:
            sure, least = best.values >= confidence, int(best.values.argmax())
        sure[least] |= not bool(sure.any())
        for place, token, taken in zip(masks, best.indices.tolist(), sure.tolist(), strict=True):
            if taken:
                known[place] = token
        masks = [place for place in masks if place not in known]
