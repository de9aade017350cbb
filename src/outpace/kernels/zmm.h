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
#define LOW_PAIRS(a, b) ((FLOATS)_mm512_unpacklo_ps(a, b))
#define HIGH_PAIRS(a, b) ((FLOATS)_mm512_unpackhi_ps(a, b))
#define LOW_HALVES(a, b) ((FLOATS)_mm512_shuffle_ps(a, b, 0x44))
#define HIGH_HALVES(a, b) ((FLOATS)_mm512_shuffle_ps(a, b, 0xee))

#include "vector.h"

/* Exchange rows and columns of 16 registers. */
INLINE void V(transpose)(FLOATS rows[LANES]) {
    V(transpose_blocks)(rows);
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        const FLOATS a = (FLOATS)_mm512_shuffle_f32x4(rows[at], rows[at + 4], 0x44);
        const FLOATS b = (FLOATS)_mm512_shuffle_f32x4(rows[at], rows[at + 4], 0xee);
        const FLOATS c = (FLOATS)_mm512_shuffle_f32x4(rows[at + 8], rows[at + 12], 0x44);
        const FLOATS d = (FLOATS)_mm512_shuffle_f32x4(rows[at + 8], rows[at + 12], 0xee);
        rows[at] = (FLOATS)_mm512_shuffle_f32x4(a, c, 0x88), rows[at + 4] = (FLOATS)_mm512_shuffle_f32x4(a, c, 0xdd);
        rows[at + 8] = (FLOATS)_mm512_shuffle_f32x4(b, d, 0x88), rows[at + 12] = (FLOATS)_mm512_shuffle_f32x4(b, d, 0xdd);
    }
}
