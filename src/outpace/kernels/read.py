"""Sampling and scoring of logits in Triton: one program per row, read in its own dtype.

The reference implementation is `decoding/sampling.py`. Functions pass on `source`, a row's logits,
the logits to mix in, their ratio and the size of the vocabulary; `key`, the two words of a noise
key; and `filters`: top-p, top-k and the logarithm of min-p.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_REDRAWS = tl.constexpr(8)
"""Candidates that are tried before the threshold of the filters is searched."""


@triton.jit
def scramble_words(x):
    """Apply a bijection of 32-bit words, as in `decoding/sampling.py`."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def uniform_noise(columns, key):
    """Return uniform noise of columns, as in `decoding/sampling.py`."""
    low, high = key
    words = columns.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)
    words = scramble_words(scramble_words(words ^ low) ^ high)
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def gumbel_noise(columns, key):
    """Return Gumbel noise of columns, as in `decoding/sampling.py`."""
    u = uniform_noise(columns, key)
    # 1 - u loses precision for small u; the quotient compensates (Kahan).
    rest = 1.0 - u
    near = rest == 1.0
    logs = tl.where(near, -u, tl.log(rest) * (u / tl.where(near, 1.0, 1.0 - rest)))
    return -tl.log(-logs)


@triton.jit
def split_key(key):
    """Return the two words of a key, the lower one first."""
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def interpolate_logits(x, y, ratio):
    return tl.where(ratio < 0.5, x + ratio * (y - x), y - (y - x) * (1.0 - ratio))


@triton.jit
def load_logits(source, columns, GUESS: tl.constexpr):
    """Load logits of columns in float32; NaN becomes infinity so that it is the maximum."""
    row, guess, ratio, vocab = source
    here = columns < vocab
    x = tl.load(row + columns, mask=here, other=0.0).to(tl.float32)
    if GUESS:
        x = interpolate_logits(
            x, tl.load(guess + columns, mask=here, other=0.0).to(tl.float32), ratio
        )
    return tl.where(here, tl.where(x != x, float("inf"), x), float("-inf"))


@triton.jit
def update_best(best, token, noised, begin):
    """Update the best value and its column with the columns from `begin` on."""
    value, column = tl.max(noised, 0), tl.argmax(noised, 0)
    return tl.maximum(best, value), tl.where(value > best, begin + column, token)


@triton.jit
def scan_row(source, warm, heat, key, BLOCK: tl.constexpr, GUESS: tl.constexpr):
    """Scan a row once: its two largest logits, sums of exponentials, and a sampled token.

    `total` sums e^(x - top), `moment` the same times x - top, and `mass` e^((x - top) / heat).
    """
    lanes = tl.arange(0, BLOCK)
    top = tl.full([], -1.0e38, tl.float32)
    second, best = top, tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    moment, mass = total, total
    token = tl.full([], 0, tl.int32)
    for begin in range(0, source[3], BLOCK):
        x = load_logits(source, begin + lanes, GUESS)
        most, at = tl.max(x, 0), tl.argmax(x, 0)
        other = tl.max(tl.where(lanes == at, float("-inf"), x), 0)
        second = tl.maximum(second, tl.maximum(tl.minimum(top, most), other))
        new = tl.maximum(top, most)
        weights, fall = tl.exp(x - new), top - new
        fade = tl.exp(fall)
        terms = tl.sum(tl.maximum(x - new, -1.0e4) * weights, 0)
        moment = (moment + total * fall) * fade + terms
        total = total * fade + tl.sum(weights, 0)
        if warm:
            mass = mass * tl.exp(fall / heat) + tl.sum(tl.exp((x - new) / heat), 0)
            noised = x / heat + gumbel_noise(begin + lanes, key)
            best, token = update_best(best, token, noised, begin)
        else:
            token = tl.where(most > top, begin + at, token)
        top = new
    return top, second, total, moment, mass, token


@triton.jit
def redraw_token(
    source, heat, key, top, mass, filters, token, BLOCK: tl.constexpr, GUESS: tl.constexpr
):
    """Sample again until the token passes top-p, top-k and min-p, as in `decoding/sampling.py`.

    If a token fails, so do all tokens of at most its probability, so each attempt has fewer
    candidates. After `MAX_REDRAWS` attempts the threshold is searched, which bounds the time.
    """
    lanes = tl.arange(0, BLOCK)
    top_p, top_k, min_p = filters
    unsure = (top_p < 1.0) | (top_k < source[3]) | (min_p > float("-inf"))
    attempts = tl.full([], 0, tl.int32)
    while unsure & (attempts < MAX_REDRAWS):
        attempts += 1
        level = load_logits(source, token, GUESS) / heat
        above = tl.full([], 0.0, tl.float32)
        count = tl.full([], 0, tl.int32)
        best = tl.full([], float("-inf"), tl.float32)
        candidate = token
        for begin in range(0, source[3], BLOCK):
            x = load_logits(source, begin + lanes, GUESS)
            is_above = x / heat > level
            above += tl.sum(tl.where(is_above, tl.exp((x - top) / heat), 0.0), 0)
            count += tl.sum(is_above.to(tl.int32), 0)
            noised = tl.where(is_above, x / heat + gumbel_noise(begin + lanes, key), float("-inf"))
            best, candidate = update_best(best, candidate, noised, begin)
        unsure = (above > top_p * mass) | (count >= top_k) | (level < top / heat + min_p)
        token = tl.where(unsure, candidate, token)
    if unsure:
        edge = find_edge(source, heat, top / heat, mass, filters, BLOCK, GUESS)
        best = tl.full([], float("-inf"), tl.float32)
        for begin in range(0, source[3], BLOCK):
            level = load_logits(source, begin + lanes, GUESS) / heat
            noised = level + gumbel_noise(begin + lanes, key)
            noised = tl.where(level >= edge, noised, float("-inf"))
            best, token = update_best(best, token, noised, begin)
    return token


@triton.jit
def sum_above_edge(source, heat, top, edge, BLOCK: tl.constexpr, GUESS: tl.constexpr):
    """Sum e^(x / heat - top), and this times its exponent, over logits at or above the edge."""
    lanes = tl.arange(0, BLOCK)
    total = tl.full([], 0.0, tl.float32)
    moment = total
    for begin in range(0, source[3], BLOCK):
        level = load_logits(source, begin + lanes, GUESS) / heat
        weights = tl.where(level >= edge, tl.exp(level - top), 0.0)
        total += tl.sum(weights, 0)
        moment += tl.sum(tl.maximum(level - top, -1.0e4) * weights, 0)
    return total, moment


@triton.jit
def order_bits(bits):
    """Map a float32's bits to an integer of the same order; the map is its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def order_index(level):
    """Return the rank of a number among all numbers of its type."""
    return order_bits(level.to(tl.int32, bitcast=True))


@triton.jit
def find_edge(source, heat, top, total, filters, BLOCK: tl.constexpr, GUESS: tl.constexpr):
    """Return the smallest x / heat that passes the filters; ties pass (`decoding/sampling.py`).

    A binary search over float32 takes at most 32 steps. Where the mass above a number equals
    `top_p` within rounding, the reference may decide differently.
    """
    lanes = tl.arange(0, BLOCK)
    top_p, top_k, min_p = filters
    low, high = order_index(tl.full([], float("-inf"), tl.float32)), order_index(top)
    high = tl.where((top_p < 1.0) | (top_k < source[3]), high, low)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        edge = order_bits(middle).to(tl.float32, bitcast=True)
        above = tl.full([], 0.0, tl.float32)
        count = tl.full([], 0, tl.int32)
        over, under = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
        for begin in range(0, source[3], BLOCK):
            level = load_logits(source, begin + lanes, GUESS) / heat
            more = level > edge
            above += tl.sum(tl.where(more, tl.exp(level - top), 0.0), 0)
            count += tl.sum(more.to(tl.int32), 0)
            over = tl.minimum(over, tl.min(tl.where(more, level, float("inf")), 0))
            under = tl.maximum(under, tl.max(tl.where(more, float("-inf"), level), 0))
        outside = (above > top_p * total) | (count >= top_k)
        low = tl.where(outside, tl.maximum(order_index(over), middle + 1), low)
        high = tl.where(outside, high, tl.minimum(order_index(under), middle))
    return tl.maximum(order_bits(high).to(tl.float32, bitcast=True), top + min_p)


@triton.jit
def sampling_law(source, heat, top, filters, BLOCK: tl.constexpr, GUESS: tl.constexpr):
    """Return a row's distribution after temperature and filters: maximum, threshold and sums."""
    top_p, top_k, min_p = filters
    top = top / heat
    edge = tl.full([], float("-inf"), tl.float32)
    total, moment = sum_above_edge(source, heat, top, edge, BLOCK, GUESS)
    if (top_p < 1.0) | (top_k < source[3]) | (min_p > float("-inf")):
        edge = find_edge(source, heat, top, total, filters, BLOCK, GUESS)
        total, moment = sum_above_edge(source, heat, top, edge, BLOCK, GUESS)
    return top, edge, total, moment


@triton.jit
def store_scores(scores, rows, me, x, second, logsum, heat, law):
    """Store the scores of a token with logit x, given its row's distribution."""
    top, edge, total, moment = law
    other = tl.where(second / heat >= edge, second / heat, float("-inf"))
    tl.store(scores + me, tl.exp(x / heat - top) / total)
    tl.store(scores + rows + me, x - logsum)
    tl.store(scores + 2 * rows + me, (1.0 - tl.exp(other - top)) / total)
    tl.store(scores + 3 * rows + me, tl.log(total) - moment / total)
    tl.store(scores + 4 * rows + me, logsum)


# Row counts and buffer offsets change with every pass and must not trigger a recompilation.
@triton.jit(
    do_not_specialize=[
        *("ratios", "temperatures", "top_ps", "top_ks", "min_ps", "keys", "drawn"),
        "rows",
    ]
)
def read(
    logits, guesses, ratios, temperatures, top_ps, top_ks, min_ps, keys, drawn, tokens, scores,
    rows, vocab, stride, guess_stride,
    BLOCK: tl.constexpr, GUESS: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Sample the token of a row and compute its scores.

    `logits [rows, vocab]` have any dtype, as have the `guesses` that are mixed in if `GUESS`;
    `min_ps` are logarithms. `tokens i64[rows]` are sampled, at temperature 0 the arg-max. `scores
    f32[5, rows]` are confidence, logprob, margin, entropy, and the logarithm of the sum of
    exponentials, all at temperature 1. If `DRAWN`, confidence, margin and entropy of the rows in
    `drawn i1[rows]` are computed from the distribution after temperature and filters.
    """
    me = tl.program_id(0).to(tl.int64)
    row, guess, ratio = logits + me * stride, guesses + me * guess_stride, 0.0
    if GUESS:
        ratio = tl.load(ratios + me)
    temperature = tl.load(temperatures + me)
    source, key = (row, guess, ratio, vocab), split_key(tl.load(keys + me))
    warm = temperature > 0
    heat = tl.where(warm, temperature, 1.0)
    top, second, total, moment, mass, token = scan_row(source, warm, heat, key, BLOCK, GUESS)
    filters = (tl.load(top_ps + me), tl.load(top_ks + me), tl.load(min_ps + me))
    if warm:
        token = redraw_token(source, heat, key, top, mass, filters, token, BLOCK, GUESS)
    x = load_logits(source, token, GUESS)
    tl.store(tokens + me, token.to(tl.int64))
    logsum = top + tl.log(total)
    law = (top, tl.full([], float("-inf"), tl.float32), total, moment)
    scale = tl.full([], 1.0, tl.float32)
    if DRAWN:  # noqa: SIM102 - a compile-time constant, unlike the second condition
        if tl.load(drawn + me):
            law = sampling_law(source, heat, top, filters, BLOCK, GUESS)
            scale = heat
    store_scores(scores, rows, me, x, second, logsum, scale, law)
