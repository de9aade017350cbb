/* Rounding of float32 to blocks of INT4; blocks.h describes them.

   Zero points and scales around those of a block's range are tried. For each, the scale is fitted to its
   codes by least squares and rounded to float16, and the codes are rounded again. The pair with the least
   squared error is kept. Blocks are rounded together, one per lane. */

#include <stdint.h>
#include <string.h>

#include "isa.h"

#if X86 || ARM

#include "parallel.h"

enum {
    BLOCK = 32,   /* numbers of a block */
    BYTES = 19,   /* of a block */
    MOST = 15,    /* the largest code */
    SHIFTS = 3,   /* zero points that are tried */
    SCALES = 6,   /* scales that are tried */
};

#include "base.h"

/* The codes minus the zero point of one number per block, for the reciprocal of the scale. */
INLINE FLOATS code_of(FLOATS number, FLOATS inverse, FLOATS zero) {
    return MIN(MAX(ROUND(number * inverse), -zero), MOST - zero);
}

/* The reciprocal; zero if it is infinite. */
INLINE FLOATS inverse_of(FLOATS scale) { return V(select)(scale > 1e-37f, 1 / scale, ALL_FLOATS(0)); }

/* Round to float16. */
INLINE FLOATS halved(FLOATS numbers) {
    uint16_t halves[LANES];
    STORE_HALVES(halves, numbers);
    return LOAD_HALVES(halves);
}

/* Fit the scale to the codes of a first one, and round it to float16; return the squared error. */
INLINE FLOATS fit_scale(const FLOATS *numbers, FLOATS first, FLOATS zero, FLOATS *scale) {
    FLOATS inverse = inverse_of(first), products = ALL_FLOATS(0), squares = products, error = products;
    for (int at = 0; at < BLOCK; at++) {
        const FLOATS code = code_of(numbers[at], inverse, zero);
        products = FMA(code, numbers[at], products);
        squares = FMA(code, code, squares);
    }
    *scale = halved(products / MAX(squares, ALL_FLOATS(1)));
    inverse = inverse_of(*scale);
    for (int at = 0; at < BLOCK; at++) {
        const FLOATS off = FMA(code_of(numbers[at], inverse, zero), *scale, -numbers[at]);
        error = FMA(off, off, error);
    }
    return error;
}

/* Write up to LANES blocks. */
INLINE void write_blocks(const FLOATS *numbers, FLOATS scale, FLOATS zero, long count, uint8_t *to) {
    const FLOATS inverse = inverse_of(scale);
    int32_t codes[BLOCK][LANES], zeros[LANES];
    uint16_t halves[LANES];
    for (int at = 0; at < BLOCK; at++)
        V(store_ints)(codes[at], V(to_ints)(code_of(numbers[at], inverse, zero) + zero));
    V(store_ints)(zeros, V(to_ints)(zero));
    STORE_HALVES(halves, scale);
    for (long lane = 0; lane < count; lane++, to += BYTES) {
        memcpy(to, halves + lane, 2);
        to[2] = zeros[lane];
        for (int at = 0; at < BLOCK / 2; at++) to[3 + at] = codes[at][lane] | codes[at + BLOCK / 2][lane] << 4;
    }
}

/* Round up to LANES blocks. The scale of a block that needs one beyond float16 is infinite. */
WITHIN static void round_blocks(const float *from, long count, uint8_t *to) {
    FLOATS numbers[BLOCK], low = ALL_FLOATS(0), high = low;
    for (int at = 0; at < BLOCK; at++) {
        float some[LANES] = {0};
        for (long lane = 0; lane < count; lane++) some[lane] = from[BLOCK * lane + at];
        numbers[at] = V(load)(some);
        low = MIN(low, numbers[at]);
        high = MAX(high, numbers[at]);
    }
    const FLOATS step = (high - low) * (1.0f / MOST);
    FLOATS least = ALL_FLOATS(__builtin_inff()), scale = least, zero = ALL_FLOATS(0);
    for (int shift = 0; shift < SHIFTS; shift++) {
        FLOATS own = ROUND(-low * inverse_of(step) + (float)(shift - SHIFTS / 2));
        own = MIN(MAX(own, ALL_FLOATS(0)), ALL_FLOATS(MOST));
        for (int part = 0; part < SCALES; part++) {
            FLOATS fitted;
            const FLOATS error = fit_scale(numbers, step * (1.05f - 0.07f * part), own, &fitted);
            const INTS less = error < least;
            least = V(select)(less, error, least);
            scale = V(select)(less, fitted, scale);
            zero = V(select)(less, own, zero);
        }
    }
    write_blocks(numbers, scale, zero, count, to);
}

struct blocks {
    const float *from;
    long count;
    uint8_t *to;
};

static void round_number(void *context, size_t number) {
    const struct blocks *blocks = context;
    const long first = number * LANES, left = blocks->count - first;
    round_blocks(blocks->from + BLOCK * first, left < LANES ? left : LANES, blocks->to + BYTES * first);
}

/* Round `blocks` blocks of 32 numbers. */
void outpace_round_int4(const float *from, long count, uint8_t *to, int threads) {
    struct blocks blocks = {from, count, to};
    run_parallel((count + LANES - 1) / LANES, threads, &blocks, round_number);
}

#else

void outpace_round_int4(const float *from, long count, uint8_t *to, int threads) {}

#endif
