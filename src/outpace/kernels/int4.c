/* Rounding of float32 to blocks of INT4, for x86 processors; packed.c describes the blocks.

   Zero points and scales around those of a block's range are tried. For each, the scale is fitted to its
   codes by least squares and rounded to float16, and the codes are rounded again. The pair with the least
   squared error is kept. Eight blocks are rounded at a time, one per lane. */

#include <stdint.h>
#include <string.h>

enum {
    BLOCK = 32,   /* numbers of a block */
    BYTES = 19,   /* of a block */
    LANES = 8,    /* blocks that are rounded at a time */
    MOST = 15,    /* the largest code */
    SHIFTS = 3,   /* zero points that are tried */
    SCALES = 6,   /* scales that are tried */
};

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define WITHIN __attribute__((target("avx2,fma,f16c")))

/* The codes minus the zero point of one number per block, for the reciprocal of the scale. */
WITHIN static inline __m256 code_of(__m256 number, __m256 inverse, __m256 least, __m256 most) {
    const __m256 code = _mm256_round_ps(_mm256_mul_ps(number, inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_min_ps(_mm256_max_ps(code, least), most);
}

/* The reciprocal; zero if it is infinite. */
WITHIN static inline __m256 inverse_of(__m256 scale) {
    const __m256 enough = _mm256_cmp_ps(scale, _mm256_set1_ps(1e-37f), _CMP_GT_OQ);
    return _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1), scale), enough);
}

/* Fit the scale to the codes of a first one, and round it to float16; return the squared error. */
WITHIN static inline __m256 fit_scale(const __m256 *numbers, __m256 first, __m256 zero, __m256 *scale) {
    const __m256 least = _mm256_sub_ps(_mm256_setzero_ps(), zero), most = _mm256_sub_ps(_mm256_set1_ps(MOST), zero);
    __m256 inverse = inverse_of(first), products = _mm256_setzero_ps(), squares = products, error = products;
    for (int at = 0; at < BLOCK; at++) {
        const __m256 code = code_of(numbers[at], inverse, least, most);
        products = _mm256_fmadd_ps(code, numbers[at], products);
        squares = _mm256_fmadd_ps(code, code, squares);
    }
    const __m256 fitted = _mm256_div_ps(products, _mm256_max_ps(squares, _mm256_set1_ps(1)));
    *scale = _mm256_cvtph_ps(_mm256_cvtps_ph(fitted, _MM_FROUND_TO_NEAREST_INT));
    inverse = inverse_of(*scale);
    for (int at = 0; at < BLOCK; at++) {
        const __m256 code = code_of(numbers[at], inverse, least, most);
        const __m256 off = _mm256_fmsub_ps(code, *scale, numbers[at]);
        error = _mm256_fmadd_ps(off, off, error);
    }
    return error;
}

/* Write up to eight blocks. */
WITHIN static void write_blocks(const __m256 *numbers, __m256 scale, __m256 zero, long count, uint8_t *to) {
    const __m256 least = _mm256_sub_ps(_mm256_setzero_ps(), zero), most = _mm256_sub_ps(_mm256_set1_ps(MOST), zero);
    const __m256 inverse = inverse_of(scale);
    int32_t codes[BLOCK][LANES], zeros[LANES];
    uint16_t halves[LANES];
    for (int at = 0; at < BLOCK; at++) {
        const __m256 code = _mm256_add_ps(code_of(numbers[at], inverse, least, most), zero);
        _mm256_storeu_si256((__m256i *)codes[at], _mm256_cvtps_epi32(code));
    }
    _mm256_storeu_si256((__m256i *)zeros, _mm256_cvtps_epi32(zero));
    _mm_storeu_si128((__m128i *)halves, _mm256_cvtps_ph(scale, _MM_FROUND_TO_NEAREST_INT));
    for (long lane = 0; lane < count; lane++, to += BYTES) {
        memcpy(to, halves + lane, 2);
        to[2] = zeros[lane];
        for (int at = 0; at < BLOCK / 2; at++) to[3 + at] = codes[at][lane] | codes[at + BLOCK / 2][lane] << 4;
    }
}

/* Round up to eight blocks. The scale of a block that needs one beyond float16 is infinite. */
WITHIN static void round_blocks(const float *from, long count, uint8_t *to) {
    __m256 numbers[BLOCK], low = _mm256_setzero_ps(), high = low;
    for (int at = 0; at < BLOCK; at++) {
        float some[LANES] = {0};
        for (long lane = 0; lane < count; lane++) some[lane] = from[BLOCK * lane + at];
        numbers[at] = _mm256_loadu_ps(some);
        low = _mm256_min_ps(low, numbers[at]);
        high = _mm256_max_ps(high, numbers[at]);
    }
    const __m256 span = _mm256_sub_ps(high, low), step = _mm256_mul_ps(span, _mm256_set1_ps(1.0f / MOST));
    const __m256 below = _mm256_sub_ps(_mm256_setzero_ps(), low), zeros = _mm256_setzero_ps();
    __m256 least = _mm256_set1_ps(__builtin_inff()), scale = least, zero = zeros;
    for (int shift = 0; shift < SHIFTS; shift++) {
        __m256 own = _mm256_add_ps(_mm256_mul_ps(below, inverse_of(step)), _mm256_set1_ps(shift - SHIFTS / 2));
        own = _mm256_round_ps(own, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        own = _mm256_min_ps(_mm256_max_ps(own, zeros), _mm256_set1_ps(MOST));
        for (int part = 0; part < SCALES; part++) {
            __m256 fitted;
            const __m256 first = _mm256_mul_ps(step, _mm256_set1_ps(1.05f - 0.07f * part));
            const __m256 error = fit_scale(numbers, first, own, &fitted);
            const __m256 less = _mm256_cmp_ps(error, least, _CMP_LT_OQ);
            least = _mm256_blendv_ps(least, error, less);
            scale = _mm256_blendv_ps(scale, fitted, less);
            zero = _mm256_blendv_ps(zero, own, less);
        }
    }
    write_blocks(numbers, scale, zero, count, to);
}

/* Round `blocks` blocks of 32 numbers. */
void outpace_round_int4(const float *from, long blocks, uint8_t *to, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long block = 0; block < blocks; block += LANES)
        round_blocks(from + BLOCK * block, blocks - block < LANES ? blocks - block : LANES, to + BYTES * block);
}

#else

void outpace_round_int4(const float *from, long blocks, uint8_t *to, int threads) {}

#endif
