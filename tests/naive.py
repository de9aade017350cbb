"""Naive loops of all methods at temperature 0, straight from their papers.

No forwards, reads, pages or batches: a canvas, a model called on rows, and lists of keys and values
where a method caches them. `outpace.methods` must give the same tokens.
"""

from collections.abc import Callable
from statistics import mean

import torch
from torch import Tensor

from helpers import dense, whole
from outpace.methods.copies import MAX_COPY_TOKENS
from outpace.models.draft import DFlashDraft, DFlashFusedDraft
from outpace.models.extending import EagleDraft
from outpace.models.transformer import Transformer
from runs import attend_where


def autoregressive(
    model: Transformer, prompt: list[int], max_tokens: int, eos: int | None = None
) -> list[int]:
    """Append the most probable next token, again and again."""
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


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return the attention of rows `[q, H, D]` to keys `[k, h, D]`, except where `hidden`."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    weights = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if hidden is not None:
        weights = weights.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", weights.softmax(-1), v)


class Kept:
    """Keys and values of a canvas, from the last time that each token was computed."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * model.config.layers

    @torch.inference_mode()
    def logits(self, canvas: list[int], left: int, right: int | None = None) -> Tensor:
        """Compute `canvas[left:right]` with full attention; raw logits, the mask banned."""
        right = len(canvas) if right is None else right

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if (held := self.layers[layer]) is not None:
                k, v = (
                    torch.cat((old[:left], new, old[right : len(canvas)]))
                    for old, new in zip(held, (k, v), strict=True)
                )
            self.layers[layer] = k, v
            return attention(q, k, v)

        ids, positions = torch.tensor(canvas[left:right]), torch.arange(left, right)
        logits = self.model.compute_logits(self.model(ids, positions, attend))
        assert self.model.config.mask_id is not None
        logits[:, self.model.config.mask_id] = -torch.inf
        return logits


def left_edge(window: int | None, before: int | None) -> int:
    """Return the first recomputed token: `window - 1` tokens before the last group."""
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
    """Append the remaining masks, or the next few, and accept the first of them."""
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
    """Accept the guesses up to the first on which model and verifier together disagree."""
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
        # Minus infinity cannot be weighted: the mask is banned at any ratio.
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


Verified = tuple[list[int], list[int]]
Paths = set[tuple[int, ...]]
"""Output, and the number of tokens accepted by each verification."""


def verified(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    eos: int | None,
    guess: Callable[[list[int], int], list[int]],
) -> Verified:
    """Accept what `guess` drafts (some tokens, at most this many) up to the first mismatch."""
    ids, kept = list(prompt), []
    limit = len(prompt) + max_tokens
    while len(ids) < limit:
        drafted = guess(ids, limit - len(ids) - 1) if kept else []
        logits = whole(model, ids + drafted, causal=True)[len(ids) - 1 :]
        before = len(ids)
        for token, draft in zip(logits.argmax(-1).tolist(), [*drafted, None], strict=True):
            if token == eos:
                return ids[len(prompt) :], [*kept, len(ids) - before]
            ids.append(token)
            if token != draft:
                break
        kept.append(len(ids) - before)
    return ids[len(prompt) :], kept


def copy_of(ids: list[int], most: int, match: int) -> list[int]:
    """Return what followed the longest earlier copy of the end, at most as much as it repeats.

    Among the longest the most frequent next token is preferred, then the latest place.
    """
    lengths: dict[int, int] = {}
    for begin in range(1, len(ids)):
        lengths[begin] = 0
        while ids[begin - 1 - lengths[begin] : begin] == ids[len(ids) - 1 - lengths[begin] :]:
            lengths[begin] += 1
            if lengths[begin] == begin:
                break
    longest = max(lengths.values(), default=0)
    if longest < match:
        return []
    begins = [begin for begin, length in lengths.items() if length == longest]
    nexts = [ids[begin] for begin in begins]
    token = max(reversed(nexts), key=nexts.count)
    begin = max(each for each in begins if ids[each] == token)
    text = list(ids)
    for _ in range(min(most, longest)):
        text.append(text[begin + len(text) - len(ids)])
    return text[len(ids) :]


def speculative(
    model: Transformer,
    draft: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    tokens: int,
    match: int = 0,
    eos: int | None = None,
) -> Verified:
    """Drafts are the draft model's own tokens, or copies of at least `match`.

    Shorter copies are drafts while as many of their tokens would have been accepted in the mean.
    """
    copies, drafts, choices = [0.0], [0.5], list[tuple[int, list[int], bool]]()

    def guess(ids: list[int], most: int) -> list[int]:
        for begin, copied, is_copy in choices:
            followed = ids[begin:]
            if copied:
                agreeing = [a == b for a, b in zip(copied, followed, strict=False)]
                copies.append([*agreeing, False].index(False))
            if not is_copy:
                drafts.append(len(followed) - 1)
        choices.clear()
        copied = copy_of(ids, min(MAX_COPY_TOKENS, most), 1)
        if match and len(copied) >= match:
            return copied
        is_copy = bool(match and copied) and mean(copies) >= mean(drafts)
        choices.append((len(ids), copied, is_copy))
        return copied if is_copy else autoregressive(draft, ids, min(tokens, most))

    return verified(model, prompt, max_tokens, eos, guess)


def lookup(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    tokens: int,
    match: int,
    eos: int | None = None,
) -> Verified:
    def guess(ids: list[int], most: int) -> list[int]:
        return copy_of(ids, min(tokens, most), match)

    return verified(model, prompt, max_tokens, eos, guess)


@torch.inference_mode()
def features_of(model: Transformer, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """Return hidden states of a text, those of some layers concatenated."""
    _, captured = model.capture_layers(
        torch.tensor(ids), torch.arange(len(ids)), dense(causal=True), layers
    )
    return torch.cat([captured[layer] for layer in layers], -1)


def dflash(
    model: Transformer,
    draft: DFlashDraft,
    prompt: list[int],
    max_tokens: int,
    *,
    block: int,
    eos: int | None = None,
) -> Verified:
    """Drafts are read from masks after the last token and all earlier features, recomputed."""

    def guess(ids: list[int], most: int) -> list[int]:
        count = min(block - 1, most)
        return block_scores(model, draft, ids, count).argmax(-1).tolist() if count else []

    return verified(model, prompt, max_tokens, eos, guess)


@torch.inference_mode()
def block_scores(model: Transformer, draft: DFlashDraft, ids: list[int], count: int) -> Tensor:
    """Return log-probabilities `[count, vocab]` of a block's masks after the text."""
    start = len(ids) - 1
    features = features_of(model, ids[:-1], draft.config.feature_layers)
    hidden = draft(
        torch.tensor([ids[-1], *[draft.config.mask_id] * count]),
        torch.arange(start, start + count + 1),
        dense(causal=False),
        context=(features, torch.arange(start)),
    )
    logits = draft.compute_logits(hidden[1:])
    logits[:, draft.config.mask_id] = -torch.inf
    return logits.log_softmax(-1)


def adding(
    model: Transformer,
    draft: DFlashFusedDraft,
    prompt: list[int],
    max_tokens: int,
    *,
    block: int,
    eos: int | None = None,
) -> Verified:
    """Drafts are read from masks after the text, which is recomputed each time."""

    @torch.inference_mode()
    def guess(ids: list[int], most: int) -> list[int]:
        count, start = min(block - 1, most), len(ids) - 1
        if not count:
            return []
        features = features_of(model, ids[:-1], draft.config.feature_layers)
        rows = torch.tensor([*ids, *[draft.config.mask_id] * count])
        hidden_slots = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        hidden_slots[start:] = False

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, hidden_slots)

        hidden = draft.embed_tokens(rows)
        hidden[:start] += draft.fuse_features(features)
        cos, sin = draft.rotary_angles(torch.arange(len(rows)), hidden.dtype)
        for each in draft.blocks:
            hidden = each(hidden, cos, sin, attend)
        logits = draft.compute_logits(draft.norm(hidden[start + 1 :]))
        logits[:, draft.config.mask_id] = -torch.inf
        return logits.argmax(-1).tolist()

    return verified(model, prompt, max_tokens, eos, guess)


@torch.inference_mode()
def ahead(draft: EagleDraft, features: Tensor, ids: list[int], path: list[int]) -> Tensor:
    """Return log-probabilities of the token after a path of drafts, without a cache.

    `features [n, f]` are of all tokens `ids` except the last.
    """
    parts, tokens = [features], [*ids[1:]]
    for token in [*path, None]:
        rows, places = torch.tensor(tokens), torch.arange(len(tokens))
        hidden, states = draft.capture_layers(rows, places, dense(causal=True), [0], features=parts)
        if token is not None:
            parts.append(states[0][-1:])
            tokens.append(token)
    return draft.compute_logits(hidden[-1]).log_softmax(-1)


def eagle(
    model: Transformer,
    draft: EagleDraft,
    prompt: list[int],
    max_tokens: int,
    *,
    width: int,
    depth: int,
    nodes: int,
    eos: int | None = None,
) -> Verified:
    """A tree is a set of paths, each drafted from the text."""
    layers = draft.config.feature_layers

    def grown(ids: list[int], levels: int) -> Paths:
        features = features_of(model, ids[:-1], layers)
        return best_paths(
            lambda path: ahead(draft, features, ids, [*path]), levels, width=width, nodes=nodes
        )

    most = min(depth + 1, nodes - 1)
    return tree_verified(model, prompt, max_tokens, eos, most, grown)


def best_paths(
    after: Callable[[tuple[int, ...]], Tensor], levels: int, *, width: int, nodes: int
) -> Paths:
    """Return the most probable paths, given log-probabilities of the token after each."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    beam: list[tuple[int, ...]] = [()]
    for _ in range(levels):
        level = {}
        for path in beam:
            best = after(path).topk(width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*path, token)] = scores[path] + value
        scores |= level
        beam = sorted(level, key=lambda path: -level[path])[:width]
    del scores[()]
    return set(sorted(scores, key=lambda path: -scores[path])[: nodes - 1])


def tree_verified(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    eos: int | None,
    most: int,
    grown: Callable[[list[int], int], Paths],
) -> Verified:
    ids, limit, kept = list(prompt), len(prompt) + max_tokens, list[int]()
    while len(ids) < limit:
        before = len(ids)
        levels = min(most, limit - before - 1) if kept else 0
        tree, path = grown(ids, levels) if levels else set(), ()
        while path is not None:
            token = int(whole(model, ids, causal=True)[-1].argmax())
            if token == eos:
                return ids[len(prompt) :], [*kept, len(ids) - before]
            ids.append(token)
            path = (*path, token)
            path = path if path in tree else None
        kept.append(len(ids) - before)
    return ids[len(prompt) :], kept


@torch.inference_mode()
def by_block(model: Transformer, canvas: list[int], ends: list[int]) -> Tensor:
    """Return logits `[n, vocab]` where rows see to the end of their block; row i has slot i."""
    stops = [next(end for end in ends if end > slot) for slot in range(len(canvas))]
    hidden = torch.arange(len(canvas)) >= torch.tensor(stops)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, hidden)

    logits = model.compute_logits(
        model(torch.tensor(canvas), torch.arange(len(canvas)), attend)
    ).float()
    logits[:, model.config.mask_id] = -torch.inf
    return logits.roll(model.config.shift, 0)


def block_diffusion(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    threshold: float | None = 0.9,
    budget: float | None = None,
    steps: int | None = None,
    order: str = "confidence",
    part: int | None = None,
    block: int | None = None,
    edit: float | None = None,
    eos: int | None = None,
) -> list[int]:
    """Fill one block after the other; everything up to its end is recomputed in every forward."""
    mask, shift, size = model.config.mask_id, model.config.shift, block or model.config.block
    ids, limit = list(prompt), len(prompt) + max_tokens
    steps = steps or size
    quotas = [size // steps + (step < size % steps) for step in range(steps)]
    own = model.config.mask_shift == 0

    def run(text: list[int], ends: list[int]) -> Tensor:
        return by_block(model, text, ends).roll(-shift if own else 0, 0)

    for begin in range(len(prompt) // size * size, limit, size):
        end = min(begin + size, limit)
        ends = [*range(size, end, size), end]
        if own:
            ends = [*range(1, begin + 1), end]
        ids += [mask] * (end - len(ids))
        turn = extra = 0
        mine = list(range(max(begin, len(prompt)), end))
        while True:
            holes = [slot for slot in mine if ids[slot] == mask]
            if not holes and (edit is None or extra == 16):
                break
            if holes and shift and holes[0] == begin:
                before = by_block(model, ids[:begin] + [0], [*ends[:-1], begin + 1])
                ids[begin] = int(before[begin].argmax())
                continue
            every = run(ids, ends)
            changes = edits(
                every, [s for s in mine[shift * (mine[0] == begin) :] if ids[s] != mask], ids, edit
            )
            extra += not holes
            if not holes and not changes:
                break
            if part and holes:
                edge = begin + ((holes[0] - begin) // part + 1) * part
                holes = [slot for slot in holes if slot < edge]
            for slot, token in changes.items():
                ids[slot] = token
            if not holes:
                continue
            logits = every[holes]
            p, best = logits.softmax(-1), logits.softmax(-1).amax(-1)
            entropy = -(p * (p + 1e-10).log()).sum(-1)
            ranks = -torch.arange(len(holes)) if order == "left_to_right" else surest(logits, order)
            first = sorted(range(len(holes)), key=lambda index: -float(ranks[index]))
            least = max(quotas[min(turn, steps - 1)], 1)
            sure: list[int] = []
            if budget is not None:
                spent = [float(entropy[index]) for index in first]
                shared = [sum(spent[:n]) - max(spent[:n]) for n in range(1, len(first) + 1)]
                count = max(sum(each <= budget for each in shared), 1)
                sure = first[:count]
            elif threshold is not None:
                sure = [index for index in first if best[index] > threshold]
            taken = sure if len(sure) >= min(least, len(first)) else first[:least]
            guesses = logits.argmax(-1).tolist()
            for index in taken:
                ids[holes[index]] = guesses[index]
            turn += 1
    return answer(ids, prompt, eos)


def edits(logits: Tensor, filled: list[int], ids: list[int], least: float | None) -> dict[int, int]:
    """LLaDA2.1: the filled slots whose most probable token is another, and above a threshold."""
    if least is None:
        return {}
    best = logits.softmax(-1).max(-1)
    return {
        slot: int(best.indices[slot])
        for slot in filled
        if best.values[slot] > least and int(best.indices[slot]) != ids[slot]
    }


def prefix_filled(
    model: Transformer, prompt: list[int], max_tokens: int, *, threshold: float | None = 0.9
) -> list[int]:
    """Show masks after the last token in one block with it, and keep the sure prefix."""
    ids, limit, size = list(prompt), len(prompt) + max_tokens, model.config.block or 1
    while len(ids) < limit:
        n, end = len(ids), min(len(ids) + size, limit)
        canvas = ids + [model.config.mask_id or 0] * (end - n - 1)
        logits = by_block(model, canvas, [*range(1, n), end - 1]).roll(-1, 0)[n - 1 :]
        best = logits.softmax(-1).amax(-1)
        sure = [float(each) > (2 if threshold is None else threshold) for each in best]
        count = max(sure.index(False) if False in sure else len(sure), 1)
        ids += [int(token) for token in logits[:count].argmax(-1)]
    return ids[len(prompt) :]


def self_verified(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    threshold: float | None = 0.9,
    block: int | None = None,
    eos: int | None = None,
) -> Verified:
    """Draft a block of masks, and compare it with what blocks of one token give.

    In a model of shift 0 a longer prompt runs without a draft, and drafts shorten near the limit.
    """
    mask, shift, size = model.config.mask_id, model.config.shift, block or model.config.block
    ids, limit, kept, drafted = list(prompt), len(prompt) + max_tokens, list[int](), list[int]()

    def alone(text: list[int]) -> int:
        ends = list(range(1, len(text) + 2))
        return int(by_block(model, [*text, mask], ends)[-1].argmax())

    def draft(text: list[int], count: int) -> list[int]:
        if count < 1:
            return []
        masks, end = count + 1 - shift, len(text) + count + 1 - shift
        ends = [*range(1, len(text) + 1), end, *[end + 1] * shift]
        rows = by_block(model, text + [mask] * masks + [0] * shift, ends)
        chances = rows[len(text) + 1 : len(text) + 1 + count].softmax(-1)
        sure = [value > (threshold or 0) for value in chances.amax(-1).tolist()]
        length = sure.index(False) if False in sure else len(sure)
        return chances.argmax(-1).tolist()[:length]

    while len(ids) < limit:
        room = limit - len(ids) - len(drafted) - 1
        following = draft(ids + drafted, min(size - 1, room))
        if not shift:
            room -= len(drafted) + 1
            is_first = not kept and len(prompt) > 1
            following = [] if is_first else draft(ids + drafted, min(size - 1, room))
        before, right = len(ids), 0
        while right >= 0:
            token = alone(ids)
            if token == eos:
                return ids[len(prompt) :], [*kept, len(ids) - before]
            ids.append(token)
            is_right = right < len(drafted) and token == drafted[right]
            following = following if is_right or right == len(drafted) else []
            right = right + 1 if is_right else -1
        kept.append(len(ids) - before)
        room = limit - len(ids) - 1
        drafted = following[: max(room if shift else room // 2, 0)]
    return ids[len(prompt) :], kept


def d2f(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    block: int | None = None,
    add: float = 0.1,
    activate: float = 0.95,
    confidence: float = 0.9,
    order: str = "confidence",
    canvas: bool = False,
    eos: int | None = None,
) -> list[int]:
    """Append, activate, accept, until no mask is left; everything is recomputed in every forward.

    The text ends at the first end-of-sequence, whether or not later slots were filled.
    """
    mask = object()  # masked slots; a prompt may contain the mask token
    ids, ends, ended = list(prompt), [len(prompt)], False
    if block is None:  # the model's own, counted from slot 0
        block = model.config.block
        ends = list(range(0, len(prompt) + 1, block))
    limit = len(prompt) + max_tokens
    limit -= (limit - ends[-1]) % block if canvas else 0
    active: set[int] = set()

    def filled(index: int) -> float:
        if not ends[index]:
            return 1.0
        begin = ends[index - 1] if index else 0
        return sum(token is not mask for token in ids[begin : ends[index]]) / (ends[index] - begin)

    while True:
        if len(ids) < limit and not ended and (not ends[-1] or filled(len(ends) - 1) >= add):
            ends.append(min(ends[-1] + block, limit))
            ids += [mask] * (ends[-1] - len(ids))
        active |= {index for index in range(1, len(ends)) if filled(index - 1) >= activate}
        if mask not in ids:
            output = ids[len(prompt) :]
            return output[: output.index(eos)] if eos in output else output
        shown = [model.config.mask_id if token is mask else token for token in ids]
        logits = by_block(model, shown, ends).clone()
        probabilities = logits.softmax(-1)
        two = probabilities.topk(2, -1).values
        ranks = {
            "confidence": two[:, 0],
            "margin": two[:, 0] - two[:, 1],
            "entropy": (probabilities * (probabilities + 1e-10).log()).sum(-1),
        }[order]
        for index in range(1, len(ends)):
            holes = [s for s in range(ends[index - 1], ends[index]) if ids[s] is mask]
            chosen = [slot for slot in holes if two[slot, 0] > confidence]
            if holes and not chosen and index in active:
                chosen = [max(holes, key=lambda slot: ranks[slot])]
            for slot in chosen:
                ids[slot] = int(probabilities[slot].argmax())
                ended |= ids[slot] == eos


def surest(logits: Tensor, order: str) -> Tensor:
    """Return the score of the hole of each row, larger first."""
    p = logits.softmax(-1)
    best = p.topk(2, -1).values
    if order == "entropy":
        return (p * (p + 1e-10).log()).sum(-1)
    return best[:, 0] - best[:, 1] if order == "margin" else best[:, 0]


def answer(ids: list[int], prompt: list[int], eos: int | None) -> list[int]:
    """Return the tokens before the first end-of-sequence."""
    out = ids[len(prompt) :]
    return out[: out.index(eos)] if eos in out else out


def diffusion(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    order: str,
    steps: int,
    block: int,
    eps: float = 0.0,
    guidance: float = 0.0,
    eos: int | None = None,
    canvas: bool = False,
) -> list[int]:
    """Run everything, fill some of the best holes of the block; drop what follows an end."""
    mask, shift = model.config.mask_id, model.config.shift
    ids, limit = list(prompt) + [mask] * max_tokens, len(prompt) + max_tokens
    starts = range(len(prompt), limit, block)
    steps //= len(starts)
    times = torch.linspace(1, eps, steps + 1)
    for begin in starts:
        left = min(begin + block, limit) - begin
        for step in range(steps):
            count = -(-left // (steps - step))
            if eps:
                count = int(left * (1 - times[step + 1] / times[step]))
            count = left if step == steps - 1 else count
            left -= count
            holes = [s for s in range(begin, min(begin + block, len(ids))) if ids[s] == mask]
            logits = Kept(model).logits(ids, 0)[[slot - shift for slot in holes]]
            if guidance:
                null = [mask] * len(prompt) + ids[len(prompt) :]
                free = Kept(model).logits(null, 0)[[slot - shift for slot in holes]]
                moved = free + (1 + guidance) * (logits - free)
                logits = moved.masked_fill(logits == -torch.inf, -torch.inf)
            ranks = surest(logits, order)
            first = range(len(holes))
            if order != "left_to_right":
                first = sorted(first, key=lambda index: -float(ranks[index]))
            for index in list(first)[:count]:
                ids[holes[index]] = int(logits[index].argmax())
            if not canvas and eos in ids[len(prompt) :]:
                ids = ids[: ids.index(eos, len(prompt)) + 1]
            if mask not in ids:
                return answer(ids, prompt, eos)
    return answer(ids, prompt, eos)


def fast_dllm(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    block: int,
    threshold: float | None = None,
    factor: float | None = None,
    budget: float | None = None,
    cache: str | None = None,
    entropy_limit: float | None = None,
    eos: int | None = None,
    canvas: bool = False,
) -> list[int]:
    """Run everything once per block, then the block or its suffix; fill the best holes."""
    mask, shift = model.config.mask_id, model.config.shift
    ids, limit = list(prompt) + [mask] * max_tokens, len(prompt) + max_tokens
    for begin in range(len(prompt), limit, block):
        kept, fresh = Kept(model), True
        while mask in ids[begin : begin + block]:
            end = min(begin + block, len(ids))
            holes = [slot for slot in range(begin, end) if ids[slot] == mask]
            if fresh and cache and shift:
                holes = holes[:1]
            if fresh or not cache:
                logits = kept.logits(ids, 0)[[slot - shift for slot in holes]]
            else:
                right = end if cache == "dual" else len(ids)
                logits = kept.logits(ids, begin, right)[[slot - shift - begin for slot in holes]]
            fresh = False
            by_entropy = budget is not None or entropy_limit is not None
            sure = surest(logits, "entropy" if by_entropy else "confidence").tolist()
            first = sorted(range(len(holes)), key=lambda index: -sure[index])
            taken = 1
            if budget is not None:
                spent = [-sure[index] for index in first]
                while taken < len(first) and sum(spent[:taken]) <= budget:
                    taken += 1
            elif factor is not None:
                while taken < len(first) and sure[first[taken]] >= 1 - factor / (taken + 2):
                    taken += 1
                taken += taken == len(first) - 1
            elif entropy_limit is not None:
                taken = max(sum(-value <= entropy_limit for value in sure), 1)
            elif threshold is not None:
                while taken < len(first) and sure[first[taken]] >= threshold:
                    taken += 1
            for index in first[:taken]:
                ids[holes[index]] = int(logits[index].argmax())
            if not canvas and eos in ids[len(prompt) :]:
                ids = ids[: ids.index(eos, len(prompt)) + 1]
    return answer(ids, prompt, eos)


@torch.inference_mode()
def row_by_row(model: Transformer, ids: list[int], places: list[int], causal: int) -> Tensor:
    """Return logits of rows at given positions; those after the first `causal` see all."""
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    seen[causal:] = True
    hidden = model(torch.tensor(ids), torch.tensor(places), attend_where(seen))
    logits = model.compute_logits(hidden)
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
    constant: bool = False,
    causal: bool = True,
    eos: int | None = None,
) -> list[int]:
    """Recompute everything, filled tokens first; fill the masks of low entropy."""
    known = dict(enumerate(prompt))
    limit, masks, ready = len(prompt) + max_tokens, [], len(prompt)
    while True:
        prefix = next(place for place in range(len(known) + 1) if place not in known)
        for place in range(len(prompt), prefix):
            if known[place] == eos or place == limit:
                return [known[p] for p in range(len(prompt), place)]
        if prefix >= limit:
            return [known[p] for p in range(len(prompt), limit)]
        if not (block and masks):
            end = (ready if constant else prefix) + window
            end = min(end, limit) if clip else end
            masks = [place for place in range(prefix, end) if place not in known]
        ready = prefix
        if not masks:  # all of a constant window is filled
            continue
        order = [*sorted(known), *masks]
        ids = [known.get(place, model.config.mask_id) for place in order]
        logits = row_by_row(model, ids, order, len(order) if causal else prefix)
        chances = logits[len(known) :].softmax(-1)
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
