/* Registers of Arm's NEON with dot products: 4 lanes. */

#include <arm_neon.h>

#define LANES 4
#define SIGNED_CODES 1 /* DOT multiplies signed codes */
#define ALL_FLOATS(x) ((FLOATS)vdupq_n_f32(x))
#define ALL_INTS(x) ((INTS)vdupq_n_s32(x))
#define FMA(a, b, c) ((FLOATS)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define MAX(a, b) ((FLOATS)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b))) /* NaN if one is NaN */
#define MIN(a, b) ((FLOATS)vminq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define ROUND(a) ((FLOATS)vrndnq_f32((float32x4_t)(a)))
#define SQRT(a) ((FLOATS)vsqrtq_f32((float32x4_t)(a)))
#define LARGEST(a) vmaxvq_f32((float32x4_t)(a))
#define MAX_INTS(a, b) ((INTS)vmaxq_s32((int32x4_t)(a), (int32x4_t)(b)))
#define LARGEST_INT(a) vmaxvq_s32((int32x4_t)(a))
#define TOTAL(a) vaddvq_s32((int32x4_t)(a))
#define LOAD_HALVES(from) ((FLOATS)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)(from)))))
#define STORE_HALVES(to, a) vst1_u8((uint8_t *)(to), vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)(a))))
#define LOAD_BFLOATS(from) ((FLOATS)vshll_n_u16(vreinterpret_u16_u8(vld1_u8((const uint8_t *)(from))), 16))
#define LOAD_BYTES(from) ((INTS)vmovl_u16(vget_low_u16(vmovl_u8(V(load_four)(from)))))
#define LOAD_SIGNED_BYTES(from) ((INTS)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(V(load_four)(from))))))
#define STORE_BYTES(to, a) V(store_bytes)(to, a) /* of numbers from -128 to 127 */
#define DOT(sum, codes, row) ((INTS)vdotq_s32((int32x4_t)(sum), (int8x16_t)(codes), (int8x16_t)(row)))
#define TIMES(a, b) ((a) * (b))
#define LOW_PAIRS(a, b) ((FLOATS)vzip1q_f32((float32x4_t)(a), (float32x4_t)(b)))
#define HIGH_PAIRS(a, b) ((FLOATS)vzip2q_f32((float32x4_t)(a), (float32x4_t)(b)))
#define LOW_HALVES(a, b) ((FLOATS)vcombine_f32(vget_low_f32((float32x4_t)(a)), vget_low_f32((float32x4_t)(b))))
#define HIGH_HALVES(a, b) ((FLOATS)vcombine_f32(vget_high_f32((float32x4_t)(a)), vget_high_f32((float32x4_t)(b))))

#include "vector.h"

INLINE uint8x8_t V(load_four)(const uint8_t *from) {
    uint32_t four;
    memcpy(&four, from, 4);
    return vreinterpret_u8_u32(vdup_n_u32(four));
}

INLINE void V(store_bytes)(void *to, INTS a) {
    const int16x4_t shorts = vmovn_s32((int32x4_t)a);
    const uint32x2_t bytes = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(shorts, shorts)));
    memcpy(to, &bytes, 4);
}

/* Exchange rows and columns of 4 registers. */
INLINE void V(transpose)(FLOATS rows[LANES]) { V(transpose_blocks)(rows); }
