/* The block formats of GGUF, and groups of 4 bits with a zero point (INT4); packed.py describes their layout
   in tiles. */

#pragma once

#include <stdint.h>
#include <string.h>

#include "isa.h"

/* GGUF's type numbers, and one that GGUF does not use. A block of INT4 is a float16 scale, a zero point in
   a byte, and 32 codes in the order of Q4_0; it stands for scale * (code - zero point). */
enum kind { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, INT4 = 1004 };

enum {
    BLOCK = 32, /* numbers of a row that share a scale */
    UNITS = 8,  /* of four numbers each, in a block */
};

#define ALWAYS static inline __attribute__((always_inline))

/* Bits of a code. */
ALWAYS int bits_of(int kind) {
    return kind == Q8_0 ? 8 : kind == Q6_K ? 6 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 5 : 4;
}

/* Blocks that share a float16 scale; with more than one, each has an integer scale as well. */
ALWAYS int blocks_of(int kind) { return kind >= Q4_K && kind <= Q6_K ? 8 : 1; }

/* Whether there is a minimum, which is added to the scaled code. */
ALWAYS int has_minimum(int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }

/* Whether each output of a block has a zero point: the code of zero. */
ALWAYS int has_zero_point(int kind) { return kind == INT4; }

/* The code of zero in formats without a minimum or zero points. */
ALWAYS int zero_of(int kind) { return has_minimum(kind) || has_zero_point(kind) ? 0 : 1 << (bits_of(kind) - 1); }

/* Bytes of a tile before the blocks that share a scale, and of each block: its scales, its codes. */
ALWAYS long head_bytes(int kind) { return (has_minimum(kind) ? 4 : has_zero_point(kind) ? 3 : 2) * WIDTH; }
ALWAYS long scale_bytes(int kind) { return blocks_of(kind) > 1 ? 2 * WIDTH : 0; }
ALWAYS long block_bytes(int kind) { return scale_bytes(kind) + 4L * bits_of(kind) * WIDTH; }
ALWAYS long super_bytes(int kind) { return head_bytes(kind) + blocks_of(kind) * block_bytes(kind); }

#define FOR_KINDS(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(INT4)
