"""Tokens and scores of logits in Triton: one program per row, which stays in its own dtype.

What is computed is what `sampling.py`, `cut.py` and `noise.py` compute; these are the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

TURNS = tl.constexpr(8)
"""Choices that are tried one by one before the edge of a cut is looked for."""


@triton.jit
def scramble(x):
    """A bijection of 32-bit words, as `noise.scramble`."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def uniform(columns, low, high):
    """Numbers between 0 and 1 of columns under the two words of a key, as `noise.uniform`."""
    words = columns.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)
    words = scramble(scramble(words ^ low) ^ high)
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def gumbel(columns, low, high):
    """Standard Gumbel noise of columns under the two words of a key, as `noise.gumbel`."""
    u = uniform(columns, low, high)
    # Rounding 1 - u loses what matters where u is small; the quotient makes up for it (Kahan).
    rest = 1.0 - u
    near = rest == 1.0
    logs = tl.where(near, -u, tl.log(rest) * (u / tl.where(near, 1.0, 1.0 - rest)))
    return -tl.log(-logs)


@triton.jit
def words(key):
    """The two words of a key, the lower one first."""
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def mixed(x, y, ratio):
    """From x at ratio 0 to y at ratio 1, as `torch.lerp`."""
    return tl.where(ratio < 0.5, x + ratio * (y - x), y - (y - x) * (1.0 - ratio))


@triton.jit
def numbers(row, guess, ratio, columns, vocab, GUESS: tl.constexpr):
    """Logits of columns in float32; what is no number is infinite, so that it is found."""
    here = columns < vocab
    x = tl.load(row + columns, mask=here, other=0.0).to(tl.float32)
    if GUESS:
        x = mixed(x, tl.load(guess + columns, mask=here, other=0.0).to(tl.float32), ratio)
    return tl.where(here, tl.where(x != x, float("inf"), x), float("-inf"))


@triton.jit
def better(best, token, noised, begin):
    """The best so far, or that of the columns from `begin` on, and the column where it is."""
    luck, lucky = tl.max(noised, 0), tl.argmax(noised, 0)
    return tl.maximum(best, luck), tl.where(luck > best, begin + lucky, token)


@triton.jit
def survey(
    row, guess, ratio, vocab, warm, heat, low, high, BLOCK: tl.constexpr, GUESS: tl.constexpr
):  # fmt: skip
    """All of a row, once: its two largest logits, sums of exponentials, and the first choice.

    `total` sums e^(x - top), `moment` the same times x - top, and `mass` e^((x - top) / heat).
    """
    lanes = tl.arange(0, BLOCK)
    top = tl.full([], -1.0e38, tl.float32)
    second, best = top, tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    moment, mass = total, total
    token = tl.full([], 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        x = numbers(row, guess, ratio, begin + lanes, vocab, GUESS)
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
            noised = x / heat + gumbel(begin + lanes, low, high)
            best, token = better(best, token, noised, begin)
        else:
            token = tl.where(most > top, begin + at, token)
        top = new
    return top, second, total, moment, mass, token


@triton.jit
def settle(
    row, guess, ratio, vocab, heat, low, high, top, mass, top_p, top_k, min_p, token,
    BLOCK: tl.constexpr, GUESS: tl.constexpr,
):  # fmt: skip
    """The first choice that is not cut off, as `cut.nucleus` finds it.

    Where one is outside, so are all that are no more probable: each turn has fewer left. After some
    turns the edge of the cut is looked for, so that all of it ends.
    """
    lanes = tl.arange(0, BLOCK)
    unsure = (top_p < 1.0) | (top_k < vocab) | (min_p > float("-inf"))
    turns = tl.full([], 0, tl.int32)
    while unsure & (turns < TURNS):
        turns += 1
        level = numbers(row, guess, ratio, token, vocab, GUESS) / heat
        above = tl.full([], 0.0, tl.float32)
        count = tl.full([], 0, tl.int32)
        best = tl.full([], float("-inf"), tl.float32)
        found = token
        for begin in range(0, vocab, BLOCK):
            x = numbers(row, guess, ratio, begin + lanes, vocab, GUESS)
            over = x / heat > level
            above += tl.sum(tl.where(over, tl.exp((x - top) / heat), 0.0), 0)
            count += tl.sum(over.to(tl.int32), 0)
            noised = tl.where(over, x / heat + gumbel(begin + lanes, low, high), float("-inf"))
            best, found = better(best, found, noised, begin)
        unsure = (above > top_p * mass) | (count >= top_k) | (level < top / heat + min_p)
        token = tl.where(unsure, found, token)
    if unsure:
        edge = bound(
            row, guess, ratio, vocab, heat, top / heat, mass, top_p, top_k, min_p, BLOCK, GUESS
        )  # fmt: skip
        best = tl.full([], float("-inf"), tl.float32)
        for begin in range(0, vocab, BLOCK):
            level = numbers(row, guess, ratio, begin + lanes, vocab, GUESS) / heat
            noised = level + gumbel(begin + lanes, low, high)
            noised = tl.where(level >= edge, noised, float("-inf"))
            best, token = better(best, token, noised, begin)
    return token


@triton.jit
def tally(row, guess, ratio, vocab, heat, top, edge, BLOCK: tl.constexpr, GUESS: tl.constexpr):
    """Sums over what is not below the edge: of e^(x / heat - top), and the same times its power."""
    lanes = tl.arange(0, BLOCK)
    total = tl.full([], 0.0, tl.float32)
    moment = total
    for begin in range(0, vocab, BLOCK):
        level = numbers(row, guess, ratio, begin + lanes, vocab, GUESS) / heat
        weights = tl.where(level >= edge, tl.exp(level - top), 0.0)
        total += tl.sum(weights, 0)
        moment += tl.sum(tl.maximum(level - top, -1.0e4) * weights, 0)
    return total, moment


@triton.jit
def ranked(bits):
    """Bits of a float32 as an integer that is in the same order, or the other way round."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def place(level):
    """A number's place among all numbers of its type."""
    return ranked(level.to(tl.int32, bitcast=True))


@triton.jit
def bound(
    row, guess, ratio, vocab, heat, top, total, top_p, top_k, min_p,
    BLOCK: tl.constexpr, GUESS: tl.constexpr,
):  # fmt: skip
    """The least x / heat that is not cut off, as `cut.Cut` finds it; ties of it survive.

    The interval in which it lies is halved, and ends at numbers of the row: 32 turns at most. Where
    the mass above a number is `top_p` but for rounding, the reference may leave it out or in.
    """
    lanes = tl.arange(0, BLOCK)
    low, high = place(tl.full([], float("-inf"), tl.float32)), place(top)
    high = tl.where((top_p < 1.0) | (top_k < vocab), high, low)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        edge = ranked(middle).to(tl.float32, bitcast=True)
        above = tl.full([], 0.0, tl.float32)
        count = tl.full([], 0, tl.int32)
        over, under = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
        for begin in range(0, vocab, BLOCK):
            level = numbers(row, guess, ratio, begin + lanes, vocab, GUESS) / heat
            more = level > edge
            above += tl.sum(tl.where(more, tl.exp(level - top), 0.0), 0)
            count += tl.sum(more.to(tl.int32), 0)
            over = tl.minimum(over, tl.min(tl.where(more, level, float("inf")), 0))
            under = tl.maximum(under, tl.max(tl.where(more, float("-inf"), level), 0))
        outside = (above > top_p * total) | (count >= top_k)
        low = tl.where(outside, tl.maximum(place(over), middle + 1), low)
        high = tl.where(outside, high, tl.minimum(place(under), middle))
    return tl.maximum(ranked(high).to(tl.float32, bitcast=True), top + min_p)


@triton.jit
def law(
    row, guess, ratio, vocab, heat, top, top_p, top_k, min_p,
    BLOCK: tl.constexpr, GUESS: tl.constexpr,
):  # fmt: skip
    """A row that is tempered and cut: its largest number, its edge, and its sums as in `tally`."""
    top = top / heat
    edge = tl.full([], float("-inf"), tl.float32)
    total, moment = tally(row, guess, ratio, vocab, heat, top, edge, BLOCK, GUESS)
    if (top_p < 1.0) | (top_k < vocab) | (min_p > float("-inf")):
        edge = bound(
            row, guess, ratio, vocab, heat, top, total, top_p, top_k, min_p, BLOCK, GUESS
        )  # fmt: skip
        total, moment = tally(row, guess, ratio, vocab, heat, top, edge, BLOCK, GUESS)
    return top, edge, total, moment


@triton.jit
def judge(scores, rows, me, x, second, logsum, heat, mine):
    """Write the scores of a token whose logit is x, from the law of its row."""
    top, edge, total, moment = mine
    other = tl.where(second / heat >= edge, second / heat, float("-inf"))
    tl.store(scores + me, tl.exp(x / heat - top) / total)
    tl.store(scores + rows + me, x - logsum)
    tl.store(scores + 2 * rows + me, (1.0 - tl.exp(other - top)) / total)
    tl.store(scores + 3 * rows + me, tl.log(total) - moment / total)
    tl.store(scores + 4 * rows + me, logsum)


# Numbers of rows and places of settings differ from pass to pass, and must not compile it anew.
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
    """The token of a row and its scores.

    `logits [rows, vocab]` are of any dtype, as are the `guesses` that are mixed in where `GUESS`;
    `min_ps` are logarithms. `tokens i64[rows]` are drawn, at temperature 0 the arg-max; `scores
    f32[5, rows]` are confidence, logprob, margin, entropy, and the logarithm of the sum of
    exponentials, all of them at temperature 1. Where `DRAWN`, confidence, margin and entropy of the
    rows that are `drawn i1[rows]` are those of the law that is tempered and cut.
    """
    me = tl.program_id(0).to(tl.int64)
    row, guess, ratio = logits + me * stride, guesses + me * guess_stride, 0.0
    if GUESS:
        ratio = tl.load(ratios + me)
    temperature = tl.load(temperatures + me)
    low, high = words(tl.load(keys + me))
    warm = temperature > 0
    heat = tl.where(warm, temperature, 1.0)
    top, second, total, moment, mass, token = survey(
        row, guess, ratio, vocab, warm, heat, low, high, BLOCK, GUESS
    )
    top_p, top_k, min_p = tl.load(top_ps + me), tl.load(top_ks + me), tl.load(min_ps + me)
    if warm:
        token = settle(
            row, guess, ratio, vocab, heat, low, high, top, mass, top_p, top_k, min_p, token,
            BLOCK, GUESS,
        )  # fmt: skip
    x = numbers(row, guess, ratio, token, vocab, GUESS)
    tl.store(tokens + me, token.to(tl.int64))
    logsum = top + tl.log(total)
    mine = (top, tl.full([], float("-inf"), tl.float32), total, moment)
    scale = tl.full([], 1.0, tl.float32)
    if DRAWN:  # noqa: SIM102 - known when it is compiled, as the second is not
        if tl.load(drawn + me):
            mine = law(row, guess, ratio, vocab, heat, top, top_p, top_k, min_p, BLOCK, GUESS)
            scale = heat
    judge(scores, rows, me, x, second, logsum, scale, mine)
