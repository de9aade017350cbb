/* Products of rows with matrices in tiles, for x86 processors with AVX512; tiles.py says what a tile is.

   A row is read in units of four bytes: a number of float32, two of bfloat16, four of 8 bits. A tile
   has for each unit the 64 bytes that 16 outputs multiply it by, so that the whole matrix is read once,
   from its beginning to its end, whatever the number of rows. Up to 16 rows share what is read.

   The numbers of a row are added in an order of their own. So what becomes of it depends neither on
   the rows beside it nor on the number of threads. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum kind { F32, BF16, I8, WIDE }; /* the last one is bfloat16 as well, multiplied in float32 */

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <omp.h>

#include "half.h"

enum {
    WIDTH = 16,  /* outputs of a tile */
    ROWS = 16,   /* rows that share what is read of a tile: their sums fill half of the registers */
    DEPTH = 128, /* rows that are laid out at a time: they stay in the cache while tiles go by */
    AHEAD = 2048, /* bytes by which many rows fetch a matrix before they need it; processors do so
                     themselves, but stop at the end of each page */
};

struct job {
    long units, outputs;
    long words; /* of four bytes in a row that is laid out */
    const char *tiles;
    const float *scale, *bias; /* of each output; the bias may be missing */
    void *out;
    float *row_scale; /* of 8 bits: the scale of each row, */
    int32_t *row_sum; /* and 128 times the sum of its codes */
};

#define PASTE(name, kind) name##_##kind
#define JOINED(name, kind) PASTE(name, kind)
#define OF(name) JOINED(name, KIND)
#define WITHIN __attribute__((target(TARGET)))

#define KIND f32
#define TARGET "avx512f,avx512bw,avx512vl"
#define SUM __m512
#define NONE _mm512_setzero_ps()
#define PLUS(a, b) _mm512_add_ps(a, b)
#define DOT(sum, tile, x, at) \
    _mm512_fmadd_ps(_mm512_castsi512_ps(tile), _mm512_castsi512_ps(_mm512_set1_epi32((x)[at])), sum)
#define FINISHED(job, sum, row, at) (sum)
#define STORE(out, at, found) _mm512_storeu_ps((float *)(out) + (at), found)
#include "tile.h"

#define KIND bf16
#define TARGET "avx512f,avx512bw,avx512vl,avx512bf16"
#define SUM __m512
#define NONE _mm512_setzero_ps()
#define PLUS(a, b) _mm512_add_ps(a, b)
#define DOT(sum, tile, x, at) \
    _mm512_dpbf16_ps(sum, (__m512bh)(tile), (__m512bh)_mm512_set1_epi32((x)[at]))
#define FINISHED(job, sum, row, at) (sum)
#define STORE(out, at, found) \
    _mm256_storeu_si256((__m256i *)((uint16_t *)(out) + (at)), (__m256i)_mm512_cvtneps_pbh(found))
#include "tile.h"

/* A number of bfloat16 is the upper half of one of float32; of a row both of a unit lie side by side. */
#define KIND wide
#define TARGET "avx512f,avx512bw,avx512vl"
#define SUM __m512
#define NONE _mm512_setzero_ps()
#define PLUS(a, b) _mm512_add_ps(a, b)
#define DOT(sum, tile, x, at)                                                                     \
    _mm512_fmadd_ps(                                                                              \
        _mm512_castsi512_ps(_mm512_and_si512(tile, _mm512_set1_epi32(~0xffff))),                  \
        _mm512_castsi512_ps(_mm512_set1_epi32((x)[2 * (at) + 1])),                                \
        _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(tile, 16)),                         \
                        _mm512_castsi512_ps(_mm512_set1_epi32((x)[2 * (at)])), sum))
#define FINISHED(job, sum, row, at) (sum)
#define STORE(out, at, found) _mm256_storeu_si256((__m256i *)((uint16_t *)(out) + (at)), halved(found))
#include "tile.h"

/* Codes of a matrix lie 128 higher, since one side of these products has no sign. */
#define KIND i8
#define TARGET "avx512f,avx512bw,avx512vl,avx512vnni"
#define SUM __m512i
#define NONE _mm512_setzero_si512()
#define PLUS(a, b) _mm512_add_epi32(a, b)
#define DOT(sum, tile, x, at) _mm512_dpbusd_epi32(sum, tile, _mm512_set1_epi32((x)[at]))
#define FINISHED(job, sum, row, at)                                                              \
    _mm512_mul_ps(                                                                               \
        _mm512_mul_ps(                                                                           \
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32((job)->row_sum[row]))),   \
            _mm512_loadu_ps((job)->scale + (at))),                                               \
        _mm512_set1_ps((job)->row_scale[row]))
#define STORE(out, at, found) _mm512_storeu_ps((float *)(out) + (at), found)
#include "tile.h"

/* Write the units of a row, a stride apart. */
static void lay(const char *row, long units, int32_t *to, long stride) {
    for (long unit = 0; unit < units; unit++) memcpy(to + unit * stride, row + 4 * unit, 4);
}

/* The same of a row of bfloat16, in float32. */
static void widen(const char *row, long units, int32_t *to, long stride) {
    for (long unit = 0; unit < units; unit++) {
        uint32_t both;
        memcpy(&both, row + 4 * unit, 4);
        const uint32_t wide[2] = {both << 16, both & 0xffff0000};
        memcpy(to + 2 * unit * stride, wide, 8);
    }
}

/* The same of a row of float32 in codes of 8 bits with a scale of its own, and 128 times their sum. The
   scale of a row with an infinity or NaN is NaN, so that all that becomes of it is. */
__attribute__((target("avx512f,avx512bw,avx512vl"))) static void quantise(
    const float *row, long units, int32_t *to, long stride, float *scale, int32_t *sum) {
    const __m512i unsigned_ = _mm512_set1_epi32(INT32_MAX);
    __m512i most = _mm512_setzero_si512(), total = _mm512_setzero_si512();
    float largest;
    for (long unit = 0; unit < units; unit += 4) {
        __mmask16 mask = units - unit < 4 ? (1u << 4 * (units - unit)) - 1 : 0xffff;
        __m512i bits = _mm512_maskz_loadu_epi32(mask, row + 4 * unit);
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, unsigned_));
    }
    int32_t bits = _mm512_reduce_max_epi32(most);
    if (bits >= 0x7f800000) { /* infinity; above it is NaN */
        for (long unit = 0; unit < units; unit++) to[unit * stride] = 0;
        *scale = __builtin_nanf("");
        *sum = 0;
        return;
    }
    memcpy(&largest, &bits, 4);
    *scale = (largest < 1e-30f ? 1e-30f : largest) / 127;
    const __m512 step = _mm512_set1_ps(*scale), half = _mm512_set1_ps(128.5f);
    for (long unit = 0; unit < units; unit += 4) {
        long left = units - unit < 4 ? units - unit : 4;
        __mmask16 mask = (1u << 4 * left) - 1;
        __m512 numbers = _mm512_maskz_loadu_ps(mask, row + 4 * unit);
        __m512i codes = _mm512_cvttps_epi32(_mm512_add_ps(_mm512_div_ps(numbers, step), half));
        codes = _mm512_sub_epi32(codes, _mm512_set1_epi32(128));
        total = _mm512_add_epi32(total, codes);
        int32_t packed[4];
        _mm_storeu_si128((__m128i *)packed, _mm512_cvtepi32_epi8(codes));
        for (long one = 0; one < left; one++) to[(unit + one) * stride] = packed[one];
    }
    *sum = 128 * _mm512_reduce_add_epi32(total);
}

/* Whether this processor has what a kind needs. */
int outpace_has_tiles(int kind) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl"))
        return 0;
    if (kind == BF16) return __builtin_cpu_supports("avx512bf16") != 0;
    return kind != I8 || __builtin_cpu_supports("avx512vnni") != 0;
}

/* Multiply `rows` of `units` by a matrix with `outputs`, a multiple of 16. Rows and what comes out are
   float32, or bfloat16 where the kind is. Gives 0 where there is no memory for a copy of the rows that
   are laid out at a time. */
int outpace_multiply(int kind, const char *x, long rows, long units, const char *tiles, long outputs,
                    const float *scale, const float *bias, void *out, int threads) {
    const long words = kind == WIDE ? 2 * units : units;
    int32_t *scratch = malloc(sizeof(int32_t) * (2 * rows + words * (rows < DEPTH ? rows : DEPTH) + 1));
    if (!scratch) return 0;
    int32_t *laid = scratch + 2 * rows;
    const struct job job = {units, outputs, words, tiles, scale, bias, out, (float *)scratch, scratch + rows};
    const long row_bytes = (kind == I8 ? 16 : 4) * units;
#pragma omp parallel num_threads(threads)
    {
        const long thread = omp_get_thread_num(), all = omp_get_num_threads();
        const long from = outputs / WIDTH * thread / all, to = outputs / WIDTH * (thread + 1) / all;
        for (long begin = 0; begin < rows; begin += DEPTH) {
            const long count = rows - begin < DEPTH ? rows - begin : DEPTH;
            if (begin) {
#pragma omp barrier
            }
#pragma omp for
            for (long row = 0; row < count; row++) {
                const long group = row / ROWS * ROWS;
                const long stride = count - group < ROWS ? count - group : ROWS;
                const char *own = x + (begin + row) * row_bytes;
                int32_t *place = laid + group * words + (row - group) * (words / units);
                if (kind == I8)
                    quantise((const float *)own, units, place, stride, job.row_scale + begin + row,
                             job.row_sum + begin + row);
                else if (kind == WIDE)
                    widen(own, units, place, stride);
                else
                    lay(own, units, place, stride);
            }
            if (kind == F32) tiles_f32(&job, laid, begin, count, from, to);
            if (kind == BF16) tiles_bf16(&job, laid, begin, count, from, to);
            if (kind == WIDE) tiles_wide(&job, laid, begin, count, from, to);
            if (kind == I8) tiles_i8(&job, laid, begin, count, from, to);
        }
    }
    free(scratch);
    return 1;
}

#else

int outpace_has_tiles(int kind) { return 0; }

int outpace_multiply(int kind, const char *x, long rows, long units, const char *tiles, long outputs,
                    const float *scale, const float *bias, void *out, int threads) {
    return 0;
}

#endif
