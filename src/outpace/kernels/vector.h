/* Vectors of one instruction set, included by ymm.h, zmm.h and neon.h, which define operations on registers;
   the file that includes those defines ISA and TARGET.

   A loop is written once, for registers of LANES 32-bit numbers: with C's operators, which GCC and clang
   apply to vectors, and with these operations. WIDTH numbers fill PARTS registers. All instruction sets add
   the same lanes in the same order, so their results have the same bits.

   ALL_FLOATS and ALL_INTS broadcast a number. FMA(a, b, c) is a * b + c, and SQRT a root, rounded once.
   ROUND gives whole numbers, ties to even. LARGEST and TOTAL reduce the lanes. LOAD_HALVES and STORE_HALVES
   convert float16, LOAD_BFLOATS bfloat16, LOAD_BYTES, LOAD_SIGNED_BYTES and STORE_BYTES 8-bit numbers.
   LOW_PAIRS(a, b) and HIGH_PAIRS(a, b) alternate the lanes of the first and last halves of blocks of four lanes;
   LOW_HALVES(a, b) and HIGH_HALVES(a, b) join these halves.
   DOT(sum, codes, row) adds to each lane the products of four 8-bit codes with four signed ones of a row;
   SIGNED_CODES is 1 if it takes the codes as signed. TIMES multiplies numbers of 16 bits. */

#include <stdint.h>
#include <string.h>

#ifndef V
#define PASTE(name, isa) name##_##isa
#define JOINED(name, isa) PASTE(name, isa)
#define V(name) JOINED(name, ISA)
#define WITHIN __attribute__((target(TARGET)))
#define INLINE WITHIN static inline __attribute__((always_inline))
#define PARTS (WIDTH / LANES)
#define FLOATS V(floats)
#define INTS V(ints)
#endif

typedef float FLOATS __attribute__((vector_size(4 * LANES)));
typedef int32_t INTS __attribute__((vector_size(4 * LANES)));
typedef uint32_t V(words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t V(shorts) __attribute__((vector_size(2 * LANES)));

INLINE FLOATS V(load)(const void *from) {
    FLOATS found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE INTS V(load_ints)(const void *from) {
    INTS found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void V(store)(void *to, FLOATS numbers) { memcpy(to, &numbers, sizeof numbers); }

INLINE void V(store_ints)(void *to, INTS numbers) { memcpy(to, &numbers, sizeof numbers); }

INLINE FLOATS V(to_floats)(INTS numbers) { return __builtin_convertvector(numbers, FLOATS); }

/* Round to zero. */
INLINE INTS V(to_ints)(FLOATS numbers) { return __builtin_convertvector(numbers, INTS); }

/* Broadcast one number from memory. */
INLINE FLOATS V(spread)(const void *from) {
    float one;
    memcpy(&one, from, 4);
    return ALL_FLOATS(one);
}

INLINE INTS V(spread_ints)(const void *from) {
    int32_t one;
    memcpy(&one, from, 4);
    return ALL_INTS(one);
}

/* Take each lane from `a` where the mask is -1, and from `b` where it is 0. */
INLINE FLOATS V(select)(INTS mask, FLOATS a, FLOATS b) { return (FLOATS)((mask & (INTS)a) | (~mask & (INTS)b)); }

/* Exchange rows and columns of each four registers, in each block of four lanes. */
INLINE void V(transpose_blocks)(FLOATS rows[LANES]) {
#pragma GCC unroll 4
    for (int at = 0; at < LANES; at += 4) {
        const FLOATS a = LOW_PAIRS(rows[at], rows[at + 1]), b = HIGH_PAIRS(rows[at], rows[at + 1]);
        const FLOATS c = LOW_PAIRS(rows[at + 2], rows[at + 3]), d = HIGH_PAIRS(rows[at + 2], rows[at + 3]);
        rows[at] = LOW_HALVES(a, c), rows[at + 1] = HIGH_HALVES(a, c);
        rows[at + 2] = LOW_HALVES(b, d), rows[at + 3] = HIGH_HALVES(b, d);
    }
}

/* Round to bfloat16, ties to even; NaN stays NaN. */
INLINE void V(store_bfloats)(void *to, FLOATS numbers) {
    const V(words) bits = (V(words))numbers, none = (V(words))(numbers != numbers);
    const V(words) up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const V(shorts) halves = __builtin_convertvector((none & (bits >> 16 | 0x40)) | (~none & up), V(shorts));
    memcpy(to, &halves, sizeof halves);
}

/* Two to the power of numbers of at most 0: a polynomial of the fractional part. */
INLINE FLOATS V(power)(FLOATS x) {
    x = MAX(ALL_FLOATS(-200), x); /* NaN stays NaN */
    const FLOATS whole = ROUND(x), part = x - whole;
    FLOATS y = ALL_FLOATS(1.5403530393381609e-4f);
    y = FMA(y, part, ALL_FLOATS(1.3333558146428443e-3f));
    y = FMA(y, part, ALL_FLOATS(9.6181291076284772e-3f));
    y = FMA(y, part, ALL_FLOATS(5.5504108664821580e-2f));
    y = FMA(y, part, ALL_FLOATS(2.4022650695910072e-1f));
    y = FMA(y, part, ALL_FLOATS(6.9314718055994531e-1f));
    y = FMA(y, part, ALL_FLOATS(1));
    /* Two factors: only the second product is rounded if the result is subnormal. */
    const INTS exponent = V(to_ints)(whole), left = exponent >> 1, right = exponent - left;
    return y * (FLOATS)((left + 127) << 23) * (FLOATS)((right + 127) << 23);
}

/* The sum of WIDTH lanes: each half of the lanes is added to the other. */
INLINE float V(add_up)(const FLOATS *parts) {
    float lanes[WIDTH];
    for (int part = 0; part < PARTS; part++) V(store)(lanes + LANES * part, parts[part]);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}
