/* Products of rows with matrices in the block formats of GGUF, and in groups of 4 bits with a zero point
   (INT4), for x86 processors; packed.py describes the layout.

   A row is quantized to 8 bits with one scale per 32 numbers. The products of these 32 are summed as
   integers, and the sums are added in float32, block after block. Each row has separate sums, so its result
   depends neither on the batch nor on the number of threads, and both loops give the same bits. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* GGUF's type numbers, and one that GGUF does not use. A block of INT4 is a float16 scale, a zero point in
   a byte, and 32 codes in the order of Q4_0; it stands for scale * (code - zero point). */
enum kind { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, INT4 = 1004 };

enum {
    WIDTH = 16, /* outputs of a tile */
    BLOCK = 32, /* numbers of a row that share a scale */
    UNITS = 8,  /* of four numbers each, in a block */
};

#define ALWAYS static inline __attribute__((always_inline))

/* Bits of a code. */
ALWAYS int bits_of(int kind) {
    return kind == Q8_0 ? 8 : kind == Q6_K ? 6 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 5 : 4;
}

/* Blocks that share a float16 scale; with more than one, each has an integer scale as well. */
ALWAYS int blocks_of(int kind) { return kind >= Q4_K && kind <= Q6_K ? 8 : 1; }

/* Whether there is a minimum, which is added to the scaled code. */
ALWAYS int has_minimum(int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }

/* Whether each output of a block has a zero point: the code of zero. */
ALWAYS int has_zero_point(int kind) { return kind == INT4; }

/* The code of zero in formats without a minimum or zero points. */
ALWAYS int zero_of(int kind) { return has_minimum(kind) || has_zero_point(kind) ? 0 : 1 << (bits_of(kind) - 1); }

/* Bytes of a tile before the blocks that share a scale, and of each block: its scales, its codes. */
ALWAYS long head_bytes(int kind) { return (has_minimum(kind) ? 4 : has_zero_point(kind) ? 3 : 2) * WIDTH; }
ALWAYS long scale_bytes(int kind) { return blocks_of(kind) > 1 ? 2 * WIDTH : 0; }
ALWAYS long block_bytes(int kind) { return scale_bytes(kind) + 4L * bits_of(kind) * WIDTH; }
ALWAYS long super_bytes(int kind) { return head_bytes(kind) + blocks_of(kind) * block_bytes(kind); }

/* Bytes of the blocks that share a scale in a file, for one output. */
ALWAYS long file_bytes(int kind) {
    switch (kind) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case INT4: return 19;
        case Q4_K: return 144;
        case Q5_K: return 176;
        default: return 210;
    }
}

ALWAYS uint32_t word(const uint8_t *from) {
    uint32_t found;
    memcpy(&found, from, 4);
    return found;
}

/* Spread four bits over four bytes. */
ALWAYS uint32_t spread(uint32_t four) { return (four & 15) * 0x204081 & 0x01010101; }

/* Read the codes of a block of a file, four per word; 128 is added to those of 8 bits. */
ALWAYS void read_codes(int kind, const uint8_t *super, int block, uint32_t *words) {
    const uint32_t nibbles = 0x0f0f0f0f, ones = 0x01010101;
    if (kind == Q8_0) {
        for (int unit = 0; unit < UNITS; unit++) words[unit] = word(super + 2 + 4 * unit) ^ 0x80808080;
    } else if (kind == Q6_K) {
        const uint8_t *low = super + 64 * (block / 4) + 32 * (block % 2), *high = super + 128 + 32 * (block / 4);
        for (int unit = 0; unit < UNITS; unit++)
            words[unit] = (word(low + 4 * unit) >> 4 * (block / 2 % 2) & nibbles) |
                          (word(high + 4 * unit) >> 2 * (block % 4) & 3 * ones) << 4;
    } else if (blocks_of(kind) > 1) {
        const uint8_t *high = super + 16, *low = super + (kind == Q5_K ? 48 : 16) + 32 * (block / 2);
        for (int unit = 0; unit < UNITS; unit++) {
            words[unit] = word(low + 4 * unit) >> 4 * (block % 2) & nibbles;
            if (kind == Q5_K) words[unit] |= (word(high + 4 * unit) >> block & ones) << 4;
        }
    } else {
        const uint8_t *high = super + head_bytes(kind) / WIDTH, *low = high + (bits_of(kind) == 5 ? 4 : 0);
        for (int unit = 0; unit < UNITS; unit++) {
            words[unit] = word(low + 4 * (unit % 4)) >> 4 * (unit / 4) & nibbles;
            if (bits_of(kind) == 5) words[unit] |= spread(word(high) >> 4 * unit) << 4;
        }
    }
}

/* Read scale and minimum of a block, 6 bits each within 12 bytes; or two scales of 8 bits. */
ALWAYS void read_scales(int kind, const uint8_t *super, int block, uint8_t *two) {
    if (kind == Q6_K) {
        memcpy(two, super + 192 + 2 * block, 2);
        return;
    }
    const uint8_t *scales = super + 4, low = block % 4;
    if (block < 4) {
        two[0] = scales[low] & 63;
        two[1] = scales[4 + low] & 63;
    } else {
        two[0] = (scales[8 + low] & 15) | (scales[low] >> 2 & 48);
        two[1] = scales[8 + low] >> 4 | (scales[4 + low] >> 2 & 48);
    }
}

/* Write the codes of an output into a block of a tile: nibbles of units 0 to 3, with those of 4 to 7
   above them, and the higher bits of all units in one or two words. */
ALWAYS void write_codes(int kind, const uint32_t *words, uint8_t *block, int output) {
    uint8_t *own = block + 4 * output;
    if (kind == Q8_0) {
        for (int unit = 0; unit < UNITS; unit++) memcpy(own + 64 * unit, words + unit, 4);
        return;
    }
    uint32_t high[2] = {0, 0};
    for (int unit = 0; unit < 4; unit++) {
        const uint32_t both = (words[unit] & 0x0f0f0f0f) | (words[unit + 4] & 0x0f0f0f0f) << 4;
        memcpy(own + 64 * unit, &both, 4);
    }
    for (int unit = 0; unit < UNITS; unit++) {
        const uint32_t above = words[unit] >> 4;
        if (bits_of(kind) == 5) high[0] |= (above & 0x01010101) << unit;
        if (bits_of(kind) == 6) high[unit / 4] |= (above & 0x03030303) << 2 * (unit % 4);
    }
    for (int part = 0; part < bits_of(kind) - 4; part++) memcpy(own + 256 + 64 * part, high + part, 4);
}

/* Read the codes of an output from a block of a tile. */
ALWAYS void find_codes(int kind, const uint8_t *block, int output, uint32_t *words) {
    const uint8_t *own = block + 4 * output;
    for (int unit = 0; unit < UNITS; unit++) {
        if (kind == Q8_0) {
            words[unit] = word(own + 64 * unit);
            continue;
        }
        words[unit] = word(own + 64 * (unit % 4)) >> 4 * (unit / 4) & 0x0f0f0f0f;
        if (bits_of(kind) == 5) words[unit] |= (word(own + 256) >> unit & 0x01010101) << 4;
        if (bits_of(kind) == 6)
            words[unit] |= (word(own + 256 + 64 * (unit / 4)) >> 2 * (unit % 4) & 0x03030303) << 4;
    }
}

/* Pack a tile of `count` rows of a file; return whether all scales are finite. Missing outputs are zero. */
ALWAYS int pack_tile(int kind, const uint8_t *const *rows, long count, long supers, uint8_t *tile) {
    const long head = head_bytes(kind), halves = has_minimum(kind) ? 4 : 2, at = kind == Q6_K ? 208 : 0;
    int finite = 1;
    if (count < WIDTH) memset(tile, 0, supers * super_bytes(kind));
    for (long output = 0; output < count; output++) {
        const uint8_t *from = rows[output];
        uint8_t *to = tile;
        for (long super = 0; super < supers; super++, from += file_bytes(kind), to += super_bytes(kind)) {
            for (long half = 0; half < halves; half += 2) {
                memcpy(to + half * WIDTH + 2 * output, from + at + half, 2);
                finite &= (from[at + half + 1] & 0x7c) != 0x7c; /* infinity or NaN of float16 */
            }
            if (has_zero_point(kind)) to[2 * WIDTH + output] = from[2];
            for (int block = 0; block < blocks_of(kind); block++) {
                uint8_t *place = to + head + block * block_bytes(kind), two[2];
                uint32_t words[UNITS];
                if (scale_bytes(kind)) {
                    read_scales(kind, from, block, two);
                    place[output] = two[0];
                    place[WIDTH + output] = two[1];
                }
                read_codes(kind, from, block, words);
                write_codes(kind, words, place + scale_bytes(kind), output);
            }
        }
    }
    return finite;
}

/* Convert a float16 to float32. */
ALWAYS float widened(const uint8_t *half) {
    const uint32_t all = half[0] | half[1] << 8, sign = (all & 0x8000) << 16, rest = all & 0x7fff;
    uint32_t bits = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + (112u << 23);
    float found, least = 6.103515625e-05f; /* the smallest normal number */
    if (rest < 0x400) { /* subnormal */
        bits = (rest << 13) + (113u << 23);
        memcpy(&found, &bits, 4);
        found -= least;
        memcpy(&bits, &found, 4);
    }
    bits |= sign;
    memcpy(&found, &bits, 4);
    return found;
}

/* Dequantize an output of a tile, as GGUF defines it. */
ALWAYS void unpack_row(int kind, const uint8_t *tile, long supers, int output, float *to) {
    for (long super = 0; super < supers; super++, tile += super_bytes(kind)) {
        const float scale = widened(tile + 2 * output);
        const float least = has_minimum(kind) ? widened(tile + 2 * WIDTH + 2 * output) : 0;
        const int zero = has_zero_point(kind) ? tile[2 * WIDTH + output] : zero_of(kind);
        for (int block = 0; block < blocks_of(kind); block++, to += BLOCK) {
            const uint8_t *place = tile + head_bytes(kind) + block * block_bytes(kind);
            uint32_t words[UNITS];
            float own[2] = {scale, scale}, minimum = least;
            if (kind == Q6_K)
                for (int half = 0; half < 2; half++) own[half] = scale * (int8_t)place[half * WIDTH + output];
            else if (scale_bytes(kind)) {
                own[0] = own[1] = scale * place[output];
                minimum = -(least * place[WIDTH + output]);
            }
            find_codes(kind, place + scale_bytes(kind), output, words);
            for (int at = 0; at < BLOCK; at++) {
                const int code = (int)(words[at / 4] >> 8 * (at % 4) & 255) - zero;
                to[at] = has_minimum(kind) ? own[0] * code + minimum : own[at / 16] * code;
            }
        }
    }
}

#define FOR_KINDS(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(INT4)

/* Bytes of a matrix in tiles. */
long outpace_packed_bytes(int kind, long outputs, long inputs) {
    return (outputs + WIDTH - 1) / WIDTH * (inputs / (BLOCK * blocks_of(kind))) * super_bytes(kind);
}

/* Pack a matrix, given by the bytes of each row in a file; return 0 if a scale is not finite. */
int outpace_pack(int kind, const uint8_t *const *rows, long outputs, long inputs, uint8_t *tiles, int threads) {
    const long supers = inputs / (BLOCK * blocks_of(kind)), bytes = supers * super_bytes(kind);
    int finite = 1;
#pragma omp parallel for num_threads(threads) reduction(& : finite)
    for (long first = 0; first < outputs; first += WIDTH) {
        const long count = outputs - first < WIDTH ? outputs - first : WIDTH;
        uint8_t *tile = tiles + first / WIDTH * bytes;
        switch (kind) {
#define PACK(kind) \
    case kind: finite &= pack_tile(kind, rows + first, count, supers, tile); break;
            FOR_KINDS(PACK)
        }
    }
    return finite;
}

/* Dequantize rows of a matrix in tiles, by index, to float32. */
void outpace_unpack(int kind, const uint8_t *tiles, long inputs, const int64_t *numbers, long count,
                    float *out, int threads) {
    const long supers = inputs / (BLOCK * blocks_of(kind)), bytes = supers * super_bytes(kind);
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < count; row++) {
        const uint8_t *tile = tiles + numbers[row] / WIDTH * bytes;
        const int output = numbers[row] % WIDTH;
        switch (kind) {
#define UNPACK(kind) \
    case kind: unpack_row(kind, tile, supers, output, out + row * inputs); break;
            FOR_KINDS(UNPACK)
        }
    }
}

/* Outputs of a matrix in one format. */
struct part {
    const uint8_t *tiles;
    long outputs, kind;
};

enum level { NONE, AVX2, VNNI };

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <omp.h>

enum {
    ROWS = 16,   /* rows that share the unpacked codes of a tile */
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

/* The number of rows to which `rows` are padded: the next one with a loop. */
static long filled(long rows) {
    return rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 8 ? 8 : rows <= 12 ? 12 : ROWS;
}

/* Quantize a row to 8 bits, as row `number` of `rows` that are interleaved block by block:
   codes [rows, 32], scales [rows], scales times sums of codes [rows], -8 times the sums of codes of
   the block and of its halves [rows, 3]. The scale of a block with an infinity or NaN is NaN. */
__attribute__((target("avx2,fma"))) static void quantise(const float *row, long inputs, uint8_t *to,
                                                         long rows, long number) {
    const __m256i unsigned_ = _mm256_set1_epi32(INT32_MAX);
    for (long block = 0; block < inputs / BLOCK; block++, row += BLOCK, to += SHARE * rows) {
        float scale;
        __m256 numbers[4];
        __m256i most = _mm256_setzero_si256(), codes[4];
        for (int part = 0; part < 4; part++) {
            numbers[part] = _mm256_loadu_ps(row + 8 * part);
            most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(numbers[part]), unsigned_));
        }
        __m128i less = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        less = _mm_max_epi32(less, _mm_shuffle_epi32(less, 0x4e));
        less = _mm_max_epi32(less, _mm_shuffle_epi32(less, 0xb1));
        const int32_t bits = _mm_cvtsi128_si32(less);
        memcpy(&scale, &bits, 4);
        scale = (scale < 1e-30f ? 1e-30f : scale) / 127;
        const int none = bits >= 0x7f800000; /* infinity or NaN */
        const __m256 step = _mm256_set1_ps(none ? __builtin_inff() : scale);
        for (int part = 0; part < 4; part++) {
            codes[part] = _mm256_cvtps_epi32(_mm256_div_ps(numbers[part], step));
            if (none) codes[part] = _mm256_setzero_si256();
        }
        __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]),
                                            _mm256_packs_epi32(codes[2], codes[3]));
        packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(to + BLOCK * number), packed);
        __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), packed);
        sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
        int32_t eight[8], halves[3];
        _mm256_storeu_si256((__m256i *)eight, sums);
        halves[1] = eight[0] + eight[1] + eight[2] + eight[3];
        halves[2] = eight[4] + eight[5] + eight[6] + eight[7];
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

#define PASTE(name, isa) name##_##isa
#define JOINED(name, isa) PASTE(name, isa)
#define OF(name) JOINED(name, ISA)

#define ISA vnni
#define TARGET "avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c"
#define LANES 16
#define INT __m512i
#define FLOAT __m512
#define V(name) _mm512_##name
#define LOAD(from) _mm512_loadu_si512(from)
#define HALVES(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from)))
#define BYTES(from) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define SIGNED(from) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define AND(a, b) _mm512_and_si512(a, b)
#define OR(a, b) _mm512_or_si512(a, b)
#define ZERO _mm512_setzero_si512()
#include "packed.h"

#define ISA avx2
#define TARGET "avx2,fma,f16c"
#define LANES 8
#define INT __m256i
#define FLOAT __m256
#define V(name) _mm256_##name
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define HALVES(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from)))
#define BYTES(from) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define SIGNED(from) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define AND(a, b) _mm256_and_si256(a, b)
#define OR(a, b) _mm256_or_si256(a, b)
#define ZERO _mm256_setzero_si256()
#include "packed.h"

/* The fastest loop of this processor. */
int outpace_packed_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return NONE;
    const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    return wide ? VNNI : AVX2;
}

/* Multiply float32 `rows` by a matrix with the outputs of `count` parts, in order. Returns 0 if there is no
   memory for the quantized copy of the rows. */
int outpace_multiply_packed(int level, const struct part *parts, int count, const float *x, long rows,
                            long inputs, long outputs, const float *bias, float *out, int threads) {
    const long row_bytes = inputs / BLOCK * SHARE, most = rows < DEPTH ? (rows + ROWS - 1) / ROWS * ROWS : DEPTH;
    uint8_t *rounded = calloc(most, row_bytes + 1); /* padding rows are zero */
    if (!rounded) return 0;
    const struct job job = {inputs, outputs, bias, out};
    long tiles = 0;
    for (int part = 0; part < count; part++) tiles += (parts[part].outputs + WIDTH - 1) / WIDTH;
#pragma omp parallel num_threads(threads)
    {
        const long thread = omp_get_thread_num(), all = omp_get_num_threads();
        const long from = tiles * thread / all, to = tiles * (thread + 1) / all;
        for (long begin = 0; begin < rows; begin += DEPTH) {
            const long some = rows - begin < DEPTH ? rows - begin : DEPTH;
            if (begin) {
#pragma omp barrier
            }
#pragma omp for
            for (long row = 0; row < some; row++) {
                const long group = row / ROWS * ROWS;
                const long side = filled(some - group < ROWS ? some - group : ROWS);
                quantise(x + (begin + row) * inputs, inputs, rounded + group * row_bytes, side, row - group);
            }
            long before = 0, column = 0;
            for (int part = 0; part < count; part++) {
                const long own = (parts[part].outputs + WIDTH - 1) / WIDTH;
                const long first = from > before ? from - before : 0, last = to - before < own ? to - before : own;
                const struct part *one = parts + part;
                if (first < last && level == VNNI)
                    part_vnni(&job, one, rounded, begin, some, column, first, last);
                else if (first < last)
                    part_avx2(&job, one, rounded, begin, some, column, first, last);
                before += own;
                column += one->outputs;
            }
        }
    }
    free(rounded);
    return 1;
}

#else

int outpace_packed_level(void) { return NONE; }

int outpace_multiply_packed(int level, const struct part *parts, int count, const float *x, long rows,
                            long inputs, long outputs, const float *bias, float *out, int threads) {
    return 0;
}

#endif
