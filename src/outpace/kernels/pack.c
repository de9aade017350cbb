/* Packing of matrices from the blocks of a file into tiles, and back to float32. */

#include "blocks.h"
#include "parallel.h"

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

/* Bytes of a matrix in tiles. */
long outpace_packed_bytes(int kind, long outputs, long inputs) {
    return (outputs + WIDTH - 1) / WIDTH * (inputs / (BLOCK * blocks_of(kind))) * super_bytes(kind);
}

/* A matrix, by the bytes of each row in a file, or by the numbers of rows to dequantize. */
struct matrix {
    int kind;
    long outputs, supers; /* a row has `supers` blocks, or groups of them that share a scale */
    const uint8_t *const *rows;
    const int64_t *numbers;
    uint8_t *tiles;
    float *out;
    int is_finite; /* whether all scales are */
};

static void pack_number(void *context, size_t number) {
    struct matrix *matrix = context;
    const long first = number * WIDTH, left = matrix->outputs - first, count = left < WIDTH ? left : WIDTH;
    uint8_t *tile = matrix->tiles + number * matrix->supers * super_bytes(matrix->kind);
    int finite = 1;
    switch (matrix->kind) {
#define PACK(kind) \
    case kind: finite = pack_tile(kind, matrix->rows + first, count, matrix->supers, tile); break;
        FOR_KINDS(PACK)
    }
    if (!finite) __atomic_store_n(&matrix->is_finite, 0, __ATOMIC_RELAXED);
}

/* Pack a matrix, given by the bytes of each row in a file; return 0 if a scale is not finite. */
int outpace_pack(int kind, const uint8_t *const *rows, long outputs, long inputs, uint8_t *tiles, int threads) {
    const long supers = inputs / (BLOCK * blocks_of(kind));
    struct matrix matrix = {kind, outputs, supers, .rows = rows, .tiles = tiles, .is_finite = 1};
    run_parallel((outputs + WIDTH - 1) / WIDTH, threads, &matrix, pack_number);
    return matrix.is_finite;
}

static void unpack_number(void *context, size_t number) {
    const struct matrix *matrix = context;
    const int64_t row = matrix->numbers[number];
    const uint8_t *tile = matrix->tiles + row / WIDTH * matrix->supers * super_bytes(matrix->kind);
    float *to = matrix->out + number * matrix->supers * BLOCK * blocks_of(matrix->kind);
    switch (matrix->kind) {
#define UNPACK(kind) \
    case kind: unpack_row(kind, tile, matrix->supers, row % WIDTH, to); break;
        FOR_KINDS(UNPACK)
    }
}

/* Dequantize rows of a matrix in tiles, by index, to float32. */
void outpace_unpack(int kind, uint8_t *tiles, long inputs, const int64_t *numbers, long count, float *out,
                    int threads) {
    const long supers = inputs / (BLOCK * blocks_of(kind));
    struct matrix matrix = {kind, .supers = supers, .numbers = numbers, .tiles = tiles, .out = out};
    run_parallel(count, threads, &matrix, unpack_number);
}
