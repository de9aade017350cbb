/* Products of rows with matrices in tiles, for x86 processors with AVX512; tiles.py defines the layout.

   A row is read in units of four bytes: one float32, two bfloat16, or four 8-bit codes. For each unit a
   tile has the 64 bytes of its 16 outputs' factors, so the matrix is read once and sequentially for
   any number of rows. Up to 16 rows share each load.

   The order of a row's sums is fixed, so its result depends neither on the batch nor on the number of
   threads. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum kind { F32, BF16, I8, WIDE }; /* WIDE is bfloat16, multiplied in float32 */

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <omp.h>

#include "half.h"

enum {
    WIDTH = 16,  /* outputs of a tile */
    ROWS = 16,   /* rows that share the loads of a tile: their sums fill half of the registers */
    DEPTH = 128, /* rows that are transposed at a time: they stay in the cache while tiles are read */
    AHEAD = 2048, /* prefetch distance in bytes with many rows: hardware prefetching stops at the
                     end of each page */
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

/* A bfloat16 is the upper half of a float32; both of a row's unit are stored next to each other. */
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

/* Codes of a matrix have an offset of 128, since one operand of dpbusd is unsigned. */
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

/* Write the units of a bfloat16 row as float32. */
static void widen(const char *row, long units, int32_t *to, long stride) {
    for (long unit = 0; unit < units; unit++) {
        uint32_t both;
        memcpy(&both, row + 4 * unit, 4);
        const uint32_t wide[2] = {both << 16, both & 0xffff0000};
        memcpy(to + 2 * unit * stride, wide, 8);
    }
}

/* Quantize a float32 row to 8-bit codes; write its scale, and 128 times the sum of the codes. The scale
   of a row with an infinity or NaN is NaN, and so is its result. */
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
    if (bits >= 0x7f800000) { /* infinity or NaN */
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

/* Whether this processor has the instructions for a kind. */
int outpace_has_tiles(int kind) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl"))
        return 0;
    if (kind == BF16) return __builtin_cpu_supports("avx512bf16") != 0;
    return kind != I8 || __builtin_cpu_supports("avx512vnni") != 0;
}

/* Multiply `rows` of `units` by a matrix with `outputs`, a multiple of 16. Rows and results are float32,
   or bfloat16 if the kind is. Returns 0 if there is no memory for the transposed copy of the rows. */
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
