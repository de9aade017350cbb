"""Rejection sampling in Triton: one program per row reads both logits in their own dtypes.

The reference implementation is `Rejection` in `decoding/accept.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.kernels.read import (
    gumbel_noise,
    load_logits,
    sampling_law,
    scan_row,
    split_key,
    store_scores,
    uniform_noise,
    update_best,
)


@triton.jit
def law_probability(x, heat, law):
    """Return the probability of logits under a distribution."""
    top, edge, total, _ = law
    level = x / heat
    return tl.where(level >= edge, tl.exp(level - top) / total, 0.0)


@triton.jit
def draw_residual(target, draft, heat, p_law, q_law, key, BLOCK: tl.constexpr):
    """Sample a token of max(p - q, 0); also return its noised logarithm, -inf if all are 0."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for begin in range(0, target[3], BLOCK):
        columns = begin + lanes
        p = law_probability(load_logits(target, columns, False), heat, p_law)
        q = law_probability(load_logits(draft, columns, False), heat, q_law)
        logs = tl.log(tl.where(p > q, p - q, 1.0))
        noised = tl.where(p > q, logs + gumbel_noise(columns, key), float("-inf"))
        best, token = update_best(best, token, noised, begin)
    return token, best


# Row counts and buffer offsets change with every pass and must not trigger a recompilation.
@triton.jit(
    do_not_specialize=[
        *("drafted", "places", "temperatures", "top_ps", "top_ks", "min_ps", "keys", "coins"),
        "rows",
    ]
)
def verify(
    logits, guesses, drafted, places, temperatures, top_ps, top_ks, min_ps, keys, coins,
    tokens, scores, rows, vocab, width, stride, guess_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Accept the draft token of a row or sample its replacement, and compute the scores.

    `logits [rows, vocab]` and `guesses [n, width]` have any dtype. The draft token `drafted
    i64[rows]`, -1 for none, was sampled from row `places i64[rows]` of the guesses. `coins
    i64[rows]` are noise keys, as `keys`. All else is as in `read.read`.
    """
    me = tl.program_id(0).to(tl.int64)
    row = logits + me * stride
    target = (row, row, 0.0, vocab)
    top, second, total, moment, mass, token = scan_row(target, False, 1.0, (0, 0), BLOCK, False)
    heat = tl.load(temperatures + me)
    if heat > 0:
        filters = (tl.load(top_ps + me), tl.load(top_ks + me), tl.load(min_ps + me))
        p_law = sampling_law(target, heat, top, filters, BLOCK, False)
        proposal, guess = tl.load(drafted + me), guesses + tl.load(places + me) * guess_stride
        q_law, is_accepted = p_law, proposal >= 0
        # Without a draft token the guess is not read, and the residual is all of p.
        draft = (guess, row, 0.0, tl.where(is_accepted, width, 0))
        if is_accepted:
            most = scan_row(draft, False, 1.0, (0, 0), BLOCK, False)[0]
            q_law = sampling_law(draft, heat, most, filters, BLOCK, False)
            p = law_probability(load_logits(target, proposal, False), heat, p_law)
            q = law_probability(load_logits(draft, proposal, False), heat, q_law)
            coin = uniform_noise(tl.full([], 0, tl.int32), split_key(tl.load(coins + me)))
            is_accepted = coin * q < p
        # A NaN logit makes the sum NaN and is the largest logit; it then stays the token.
        if (p_law[2] > 0) & (q_law[2] > 0):
            key = split_key(tl.load(keys + me))
            found, best = proposal.to(tl.int32), tl.full([], 0.0, tl.float32)
            if is_accepted == 0:
                found, best = draw_residual(target, draft, heat, p_law, q_law, key, BLOCK)
            # For equal distributions, rounding may leave no residual.
            if best == float("-inf"):
                unread = (guess, row, 0.0, 0)
                found, best = draw_residual(target, unread, heat, p_law, q_law, key, BLOCK)
            token = found
    tl.store(tokens + me, token.to(tl.int64))
    x = load_logits(target, token, False)
    law = (top, float("-inf"), total, moment)
    store_scores(scores, rows, me, x, second, top + tl.log(total), 1.0, law)
