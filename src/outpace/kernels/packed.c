/* Products of rows with packed matrices; blocks.h has their formats, and packed.py describes the layout.

   A row is quantized to 8 bits with one scale per 32 numbers. The products of these 32 are summed as
   integers, and the sums are added in float32, block after block. Each row has separate sums, so its result
   depends neither on the batch nor on the number of threads, and all loops give the same bits. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "isa.h"

/* Outputs of a matrix in one format. */
struct part {
    const uint8_t *tiles;
    long outputs, kind;
};

#if X86 || ARM

#include "parallel.h"

enum {
    ROWS = 8,    /* rows that share the unpacked codes of a tile */
    DEPTH = 128, /* rows that are quantized at a time: they stay in the cache while tiles are read */
    FEW = 4,     /* maximum of tiles that are read in parallel */
    AHEAD = 4096, /* prefetch distance in bytes for a tile that is read alone */
    SHARE = 52,  /* bytes of a block of a row: codes, scale, scaled sum, and -8 times three sums */
};

struct job {
    long inputs, outputs;
    const float *bias; /* may be null */
    float *out;
};

/* Tiles that are read in parallel. One or two rows in 8 bits are memory bound, and four streams take 0.87 of
   the time of one on an AMD EPYC. With fewer bits a single prefetched stream is faster. */
ALWAYS int together(int kind, int rows) { return kind == Q8_0 && rows <= 2 ? FEW : 1; }

#include "base.h"
#include "packed.h"

/* Quantize a row to 8 bits, as row `number` of `rows` that are interleaved block by block:
   codes [rows, 32], scales [rows], scales times sums of codes [rows], -8 times the sums of codes of
   the block and of its halves [rows, 3]. The scale of a block with an infinity or NaN is NaN. */
WITHIN static void quantise(const float *row, long inputs, uint8_t *to, long rows, long number) {
    for (long block = 0; block < inputs / BLOCK; block++, row += BLOCK, to += SHARE * rows) {
        float scale;
        int32_t halves[3];
        INTS most = ALL_INTS(0);
        for (int at = 0; at < BLOCK; at += LANES) most = MAX_INTS(most, V(load_ints)(row + at) & INT32_MAX);
        const int32_t bits = LARGEST_INT(most);
        memcpy(&scale, &bits, 4);
        scale = (scale < 1e-30f ? 1e-30f : scale) / 127;
        const int none = bits >= 0x7f800000; /* infinity or NaN */
        for (int half = 0; half < 2; half++) {
            INTS total = ALL_INTS(0);
            for (int at = half * WIDTH; at < (half + 1) * WIDTH; at += LANES) {
                INTS codes = ALL_INTS(0);
                if (!none) codes = V(to_ints)(ROUND(V(load)(row + at) / scale));
                STORE_BYTES(to + BLOCK * number + at, codes);
                total += codes;
            }
            halves[1 + half] = TOTAL(total);
        }
        halves[0] = halves[1] + halves[2];
        if (none) scale = __builtin_nanf("");
        const float whole = scale * (float)halves[0];
        for (int sum = 0; sum < 3; sum++) halves[sum] *= -8;
        uint8_t *rest = to + BLOCK * rows;
        memcpy(rest + 4 * number, &scale, 4);
        memcpy(rest + 4 * rows + 4 * number, &whole, 4);
        memcpy(rest + 8 * rows + 12 * number, halves, 12);
    }
}
#include "end.h"

#if X86

#define ISA avxvnni
#define TARGET AVX_VNNI_TARGET
#define VNNI 1
#include "ymm.h"
#include "packed.h"
#include "end.h"

#define ISA avx512vnni
#define TARGET AVX512_VNNI_TARGET
#define VNNI 1
#include "zmm.h"
#include "packed.h"
#include "end.h"

#endif

/* Up to DEPTH rows of a product, from `begin` on. */
struct pass {
    const struct job *job;
    int isa, count;
    const struct part *parts;
    long tiles, row_bytes, begin, rows, shares; /* `shares` of the tiles */
    const float *x;
    uint8_t *rounded;
};

static void quantise_row(void *context, size_t number) {
    const struct pass *pass = context;
    const long row = number, group = row / ROWS * ROWS, left = pass->rows - group, inputs = pass->job->inputs;
    const long side = left < ROWS ? left : ROWS;
    quantise(pass->x + (pass->begin + row) * inputs, inputs, pass->rounded + group * pass->row_bytes, side,
             row - group);
}

/* Multiply by a share of the tiles of all parts. */
static void multiply_share(void *context, size_t number) {
    const struct pass *pass = context;
    const long share = number, from = pass->tiles * share / pass->shares;
    const long to = pass->tiles * (share + 1) / pass->shares;
    long before = 0, column = 0;
    for (const struct part *part = pass->parts; part < pass->parts + pass->count; part++) {
        const long own = (part->outputs + WIDTH - 1) / WIDTH;
        const long first = from > before ? from - before : 0, last = to - before < own ? to - before : own;
        if (first < last) switch (pass->isa) {
#define RUN(isa) part_##isa(pass->job, part, pass->rounded, pass->begin, pass->rows, column, first, last)
#if X86
                case AVX512_VNNI: RUN(avx512vnni); break;
                case AVX_VNNI: RUN(avxvnni); break;
                default: RUN(avx2);
#else
                default: RUN(neon);
#endif
            }
        before += own;
        column += part->outputs;
    }
}

/* Multiply float32 `rows` by a matrix with the outputs of `count` parts, in order, with the loop of an
   instruction set. Returns 0 if there is no memory for the quantized copy of the rows. */
int outpace_multiply_packed(int isa, const struct part *parts, int count, const float *x, long rows,
                            long inputs, long outputs, const float *bias, float *out, int threads) {
    const long row_bytes = inputs / BLOCK * SHARE;
    uint8_t *rounded = malloc((rows < DEPTH ? rows : DEPTH) * row_bytes + 1);
    if (!rounded) return 0;
    const struct job job = {inputs, outputs, bias, out};
    struct pass pass = {&job, isa, count, parts, .row_bytes = row_bytes, .shares = threads * SHARES, .x = x, .rounded = rounded};
    for (int part = 0; part < count; part++) pass.tiles += (parts[part].outputs + WIDTH - 1) / WIDTH;
    for (; pass.begin < rows; pass.begin += DEPTH) {
        pass.rows = rows - pass.begin < DEPTH ? rows - pass.begin : DEPTH;
        run_parallel(pass.rows, threads, &pass, quantise_row);
        run_parallel(pass.shares, threads, &pass, multiply_share);
    }
    free(rounded);
    return 1;
}

#else

int outpace_multiply_packed(int isa, const struct part *parts, int count, const float *x, long rows,
                            long inputs, long outputs, const float *bias, float *out, int threads) {
    return 0;
}

#endif
