/* Registers of AVX2: 8 lanes; with VNNI, products of 8 bits have one instruction. */

#include <immintrin.h>

#define LANES 8
#define ALL_FLOATS(x) ((FLOATS)_mm256_set1_ps(x))
#define ALL_INTS(x) ((INTS)_mm256_set1_epi32(x))
#define FMA(a, b, c) ((FLOATS)_mm256_fmadd_ps(a, b, c))
#define MAX(a, b) ((FLOATS)_mm256_max_ps(a, b)) /* `b` if one is NaN */
#define MIN(a, b) ((FLOATS)_mm256_min_ps(a, b))
#define ROUND(a) ((FLOATS)_mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define SQRT(a) ((FLOATS)_mm256_sqrt_ps(a))
#define LARGEST(a) V(largest)(a)
#define MAX_INTS(a, b) ((INTS)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define LARGEST_INT(a) V(largest_int)(a)
#define TOTAL(a) V(total)(a)
#define LOAD_HALVES(from) ((FLOATS)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from))))
#define STORE_HALVES(to, a) _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT))
#define LOAD_SHORTS(from) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define LOAD_BFLOATS(from) ((FLOATS)_mm256_slli_epi32(LOAD_SHORTS(from), 16))
#define LOAD_BYTES(from) ((INTS)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from))))
#define LOAD_SIGNED_BYTES(from) ((INTS)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from))))
#define STORE_BYTES(to, a) V(store_bytes)(to, a) /* of numbers from -128 to 127 */
#define TIMES(a, b) ((INTS)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))) /* of numbers of 16 bits */
#if VNNI
#define SIGNED_CODES 0 /* DOT multiplies unsigned codes */
#define DOT(sum, codes, row) ((INTS)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(codes), (__m256i)(row)))
#else
#define SIGNED_CODES 1
#define DOT(sum, codes, row) ((sum) + V(add_pairs)(V(pairs)(codes, row)))
#endif
#define LOW_PAIRS(a, b) ((FLOATS)_mm256_unpacklo_ps(a, b))
#define HIGH_PAIRS(a, b) ((FLOATS)_mm256_unpackhi_ps(a, b))
#define LOW_HALVES(a, b) ((FLOATS)_mm256_shuffle_ps(a, b, 0x44))
#define HIGH_HALVES(a, b) ((FLOATS)_mm256_shuffle_ps(a, b, 0xee))

#include "vector.h"

#if !VNNI
/* Sums of two products of unsigned codes with a row, in 16 bits. */
#define UNSIGNED_PAIRS(codes, row) _mm256_maddubs_epi16((__m256i)(codes), (__m256i)(row))

/* Sums of two products of signed codes with a row, in 16 bits: the sign of a code is moved to the row. */
INLINE __m256i V(pairs)(INTS codes, INTS row) {
    return UNSIGNED_PAIRS(_mm256_abs_epi8((__m256i)codes), _mm256_sign_epi8((__m256i)row, (__m256i)codes));
}

INLINE INTS V(add_pairs)(__m256i pairs) { return (INTS)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
#endif

INLINE float V(largest)(FLOATS a) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

INLINE int32_t V(largest_int)(INTS a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}

INLINE int32_t V(total)(INTS a) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

INLINE void V(store_bytes)(void *to, INTS a) {
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
    _mm_storel_epi64(to, _mm_packs_epi16(shorts, shorts));
}

/* Exchange rows and columns of 8 registers. */
INLINE void V(transpose)(FLOATS rows[LANES]) {
    V(transpose_blocks)(rows);
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        const FLOATS a = rows[at], b = rows[at + 4];
        rows[at] = (FLOATS)_mm256_permute2f128_ps(a, b, 0x20);
        rows[at + 4] = (FLOATS)_mm256_permute2f128_ps(a, b, 0x31);
    }
}
