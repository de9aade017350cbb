/* Registers of AVX512: 16 lanes; with VNNI, there are products of 8 bits. */

#include <immintrin.h>

#define LANES 16
#define ALL_FLOATS(x) ((FLOATS)_mm512_set1_ps(x))
#define ALL_INTS(x) ((INTS)_mm512_set1_epi32(x))
#define FMA(a, b, c) ((FLOATS)_mm512_fmadd_ps(a, b, c))
#define MAX(a, b) ((FLOATS)_mm512_max_ps(a, b)) /* `b` if one is NaN */
#define MIN(a, b) ((FLOATS)_mm512_min_ps(a, b))
#define ROUND(a) ((FLOATS)_mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define SQRT(a) ((FLOATS)_mm512_sqrt_ps(a))
#define LARGEST(a) _mm512_reduce_max_ps(a)
#define LOAD_HALVES(from) ((FLOATS)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from))))
#define LOAD_SHORTS(from) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from)))
#define LOAD_BFLOATS(from) ((FLOATS)_mm512_slli_epi32(LOAD_SHORTS(from), 16))
#define LOAD_BYTES(from) ((INTS)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from))))
#define LOAD_SIGNED_BYTES(from) ((INTS)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from))))
#if VNNI
#define SIGNED_CODES 0 /* DOT multiplies unsigned codes */
#define DOT(sum, codes, row) ((INTS)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(codes), (__m512i)(row)))
#endif
#define TIMES(a, b) ((INTS)_mm512_madd_epi16((__m512i)(a), (__m512i)(b))) /* of numbers of 16 bits */

#include "vector.h"

/* Each block of four lanes of the result has the sums of that block of `a`, `b`, `c` and `d`. */
INLINE FLOATS V(add_lanes)(FLOATS a, FLOATS b, FLOATS c, FLOATS d) {
    const FLOATS left = (FLOATS)_mm512_unpacklo_ps(a, b) + (FLOATS)_mm512_unpackhi_ps(a, b);
    const FLOATS right = (FLOATS)_mm512_unpacklo_ps(c, d) + (FLOATS)_mm512_unpackhi_ps(c, d);
    return (FLOATS)_mm512_shuffle_ps(left, right, 0x44) + (FLOATS)_mm512_shuffle_ps(left, right, 0xee);
}

/* Add the four blocks of each vector, and join these sums. */
INLINE void V(add_blocks)(FLOATS four[4][PARTS], FLOATS *sums) {
    const FLOATS a = (FLOATS)_mm512_shuffle_f32x4(four[0][0], four[1][0], 0x44) +
                     (FLOATS)_mm512_shuffle_f32x4(four[0][0], four[1][0], 0xee);
    const FLOATS b = (FLOATS)_mm512_shuffle_f32x4(four[2][0], four[3][0], 0x44) +
                     (FLOATS)_mm512_shuffle_f32x4(four[2][0], four[3][0], 0xee);
    sums[0] = (FLOATS)_mm512_shuffle_f32x4(a, b, 0x88) + (FLOATS)_mm512_shuffle_f32x4(a, b, 0xdd);
}
