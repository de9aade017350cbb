/* Products of rows with matrices in tiles; tiles.py defines the layout.

   A row is read in units of four bytes: one float32, two bfloat16, or four 8-bit codes. For each unit a
   tile has the 64 bytes of its 16 outputs' factors, so the matrix is read once and sequentially for
   any number of rows. A few rows share each load.

   The order of a row's sums is fixed, so its result depends neither on the batch nor on the number of
   threads. All instruction sets give the same bits, except for BF16, whose sums have two products each. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "isa.h"

#if X86 || ARM

#include "parallel.h"

enum kind { F32, BF16, I8, WIDE }; /* WIDE is bfloat16, multiplied in float32 */

enum {
    DEPTH = 128, /* rows that are transposed at a time: they stay in the cache while tiles are read */
    SEGMENT = 256, /* units that are summed separately, for smaller rounding errors */
    AHEAD = 2048, /* prefetch distance in bytes with many rows: hardware prefetching stops at the
                     end of each page */
    OFFSET = (int32_t)0x80808080, /* of the codes of a matrix: one operand of x86's dot product is unsigned */
};

struct job {
    long units, outputs;
    long words; /* of four bytes in a transposed row */
    const char *tiles;
    const float *scale, *bias; /* of each output; bias may be null */
    void *out;
    float *row_scale; /* for 8 bits: the scale of each row, */
    int32_t *row_sum; /* and 128 times the sum of its codes */
};

#include "base.h"
#define KIND F32
#include "tile.h"
#define KIND WIDE
#include "tile.h"
#define KIND I8
#define SUM INTS
#include "tile.h"

/* Load a register of a row; numbers past its `left` units are zero. */
INLINE FLOATS load_units(const float *row, long left) {
    if (4 * left >= LANES) return V(load)(row);
    float numbers[LANES] = {0};
    memcpy(numbers, row, 16 * left);
    return V(load)(numbers);
}

/* Quantize a float32 row to 8-bit codes; write its scale, and 128 times the sum of the codes. The scale
   of a row with an infinity or NaN is NaN, and so is its result. */
WITHIN static void quantise(const float *row, long units, int32_t *to, long stride, float *scale, int32_t *sum) {
    const long some = LANES / 4; /* units of a register */
    INTS most = ALL_INTS(0), total = most;
    float largest;
    for (long unit = 0; unit < units; unit += some)
        most = MAX_INTS(most, (INTS)load_units(row + 4 * unit, units - unit) & INT32_MAX);
    const int32_t bits = LARGEST_INT(most);
    if (bits >= 0x7f800000) { /* infinity or NaN */
        for (long unit = 0; unit < units; unit++) to[unit * stride] = 0;
        *scale = __builtin_nanf("");
        *sum = 0;
        return;
    }
    memcpy(&largest, &bits, 4);
    *scale = (largest < 1e-30f ? 1e-30f : largest) / 127;
    for (long unit = 0; unit < units; unit += some) {
        const INTS codes = V(to_ints)(load_units(row + 4 * unit, units - unit) / *scale + 128.5f) - 128;
        int32_t packed[LANES / 4];
        total += codes;
        STORE_BYTES(packed, codes);
        for (long one = 0; one < some && unit + one < units; one++) to[(unit + one) * stride] = packed[one];
    }
    *sum = 128 * TOTAL(total);
}
#include "end.h"

#if X86

#define ISA avxvnni
#define TARGET AVX_VNNI_TARGET
#define VNNI 1
#include "ymm.h"
#define KIND I8
#define SUM INTS
#include "tile.h"
#include "end.h"

#define ISA avx512
#define TARGET AVX512_TARGET
#include "zmm.h"
#define KIND F32
#include "tile.h"
#define KIND WIDE
#include "tile.h"
#include "end.h"

#define ISA avx512vnni
#define TARGET AVX512_VNNI_TARGET
#define VNNI 1
#include "zmm.h"
#define KIND I8
#define SUM INTS
#include "tile.h"
#include "end.h"

#define ISA avx512bf16
#define TARGET AVX512_BF16_TARGET
#include "zmm.h"
#define BF16_DOT(sum, tile, row) ((FLOATS)_mm512_dpbf16_ps(sum, (__m512bh)(tile), (__m512bh)(row)))
#define KIND BF16
#include "tile.h"
#include "end.h"

#endif

/* A loop for tiles, and the rows that it interleaves. */
struct loop {
    void (*multiply)(const struct job *, const int32_t *, long first, long rows, long from, long to);
    long rows;
};

static struct loop find_loop(int kind, int isa) {
#define FOUND(kind, isa) (struct loop){tiles_##kind##_##isa, rows_##kind##_##isa}
    switch (isa) {
#if X86
        case AVX_VNNI: return FOUND(I8, avxvnni);
        case AVX512: return kind == F32 ? FOUND(F32, avx512) : FOUND(WIDE, avx512);
        case AVX512_VNNI: return FOUND(I8, avx512vnni);
        case AVX512_BF16: return FOUND(BF16, avx512bf16);
        default: return kind == F32 ? FOUND(F32, avx2) : kind == WIDE ? FOUND(WIDE, avx2) : FOUND(I8, avx2);
#else
        default: return kind == F32 ? FOUND(F32, neon) : kind == WIDE ? FOUND(WIDE, neon) : FOUND(I8, neon);
#endif
    }
}

/* Write the units of a row, a stride apart. */
static void lay(const char *row, long units, int32_t *to, long stride) {
    for (long unit = 0; unit < units; unit++) memcpy(to + unit * stride, row + 4 * unit, 4);
}

/* Write the units of a bfloat16 row as float32, both of a unit next to each other. */
static void widen(const char *row, long units, int32_t *to, long stride) {
    for (long unit = 0; unit < units; unit++) {
        uint32_t both;
        memcpy(&both, row + 4 * unit, 4);
        const uint32_t wide[2] = {both << 16, both & 0xffff0000};
        memcpy(to + 2 * unit * stride, wide, 8);
    }
}

/* Up to DEPTH rows of a product, from `begin` on. */
struct pass {
    const struct job *job;
    struct loop loop;
    int kind;
    long begin, count, shares;
    const char *x;
    int32_t *laid;
};

/* Transpose a row within the rows that share the loads of a tile. */
static void lay_row(void *context, size_t number) {
    const struct pass *pass = context;
    const struct job *job = pass->job;
    const long row = number, group = row / pass->loop.rows * pass->loop.rows, left = pass->count - group;
    const long stride = left < pass->loop.rows ? left : pass->loop.rows, at = pass->begin + row;
    const char *own = pass->x + at * (pass->kind == I8 ? 16 : 4) * job->units;
    int32_t *place = pass->laid + group * job->words + (row - group) * (job->words / job->units);
    if (pass->kind == I8)
        quantise((const float *)own, job->units, place, stride, job->row_scale + at, job->row_sum + at);
    else if (pass->kind == WIDE)
        widen(own, job->units, place, stride);
    else
        lay(own, job->units, place, stride);
}

/* Multiply by a share of the tiles. */
static void multiply_share(void *context, size_t number) {
    const struct pass *pass = context;
    const long tiles = pass->job->outputs / WIDTH, share = number;
    pass->loop.multiply(pass->job, pass->laid, pass->begin, pass->count, tiles * share / pass->shares,
                        tiles * (share + 1) / pass->shares);
}

/* Multiply `rows` of `units` by a matrix with `outputs`, a multiple of 16, with the loop of an instruction
   set. Rows and results are float32, or bfloat16 if the kind is. Returns 0 if there is no memory for the
   transposed copy of the rows. */
int outpace_multiply(int kind, int isa, const char *x, long rows, long units, const char *tiles, long outputs,
                     const float *scale, const float *bias, void *out, int threads) {
    const long words = kind == WIDE ? 2 * units : units;
    int32_t *scratch = malloc(sizeof(int32_t) * (2 * rows + words * (rows < DEPTH ? rows : DEPTH) + 1));
    if (!scratch) return 0;
    const struct job job = {units, outputs, words, tiles, scale, bias, out, (float *)scratch, scratch + rows};
    struct pass pass = {&job, find_loop(kind, isa), kind, .shares = threads * SHARES, .x = x, .laid = scratch + 2 * rows};
    for (; pass.begin < rows; pass.begin += DEPTH) {
        pass.count = rows - pass.begin < DEPTH ? rows - pass.begin : DEPTH;
        run_parallel(pass.count, threads, &pass, lay_row);
        run_parallel(pass.shares, threads, &pass, multiply_share);
    }
    free(scratch);
    return 1;
}

#else

int outpace_multiply(int kind, int isa, const char *x, long rows, long units, const char *tiles, long outputs,
                     const float *scale, const float *bias, void *out, int threads) {
    return 0;
}

#endif
