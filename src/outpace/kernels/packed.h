/* Products of up to 8 rows with tiles of packed matrices, for one instruction set; see packed.c. */

/* Unpack a unit of a block for LANES outputs. */
INLINE INTS V(unpack)(const int kind, const uint8_t *block, const int unit) {
    if (kind == Q8_0) {
        const INTS codes = V(load_ints)(block + 64 * unit);
        return SIGNED_CODES ? codes ^ ALL_INTS(0x80808080) : codes;
    }
    const INTS both = V(load_ints)(block + 64 * (unit % 4));
    const INTS low = (unit < 4 ? both : both >> 4) & ALL_INTS(0x0f0f0f0f);
    if (bits_of(kind) == 4) return low;
    const INTS high = V(load_ints)(block + 256 + (bits_of(kind) == 6 ? 64 * (unit / 4) : 0));
    const int by = bits_of(kind) == 6 ? 2 * (unit % 4) - 4 : unit - 4; /* bits down, or up below 0 */
    return low | ((by < 0 ? high << -by : high >> by) & ALL_INTS(bits_of(kind) == 6 ? 0x30303030 : 0x10101010));
}

/* Minus the contribution of the code of zero. */
INLINE INTS V(offset)(const int kind, const uint8_t *sum) {
    if (!zero_of(kind) || (kind == Q8_0 && SIGNED_CODES)) return ALL_INTS(0);
    return V(spread_ints)(sum) << (bits_of(kind) > 4 ? bits_of(kind) - 4 : 0);
}

/* Units whose products with a row are added in 16 bits, which hold the sums of 8 pairs of 4 bits, 4 of 5 bits,
   2 of 6 bits, and 1 of 8 bits; 0 for instruction sets that add in 32 bits. */
INLINE int V(pairs_of)(const int kind) {
#ifdef UNSIGNED_PAIRS
    return kind == Q8_0 ? 1 : bits_of(kind) == 4 ? 8 : bits_of(kind) == 5 ? 4 : 2;
#else
    return 0;
#endif
}

/* Add the products of `count` units with a row, to sums in 16 bits if these hold a whole block. */
INLINE INTS V(dot)(const int kind, INTS total, const INTS *units, const int count, const uint8_t *x) {
#ifdef UNSIGNED_PAIRS
    const int most = V(pairs_of)(kind);
#pragma GCC unroll 8
    for (int begin = 0; begin < count; begin += most) {
        __m256i pairs = most == UNITS ? (__m256i)total : _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int unit = begin; unit < (begin + most < count ? begin + most : count); unit++) {
            const INTS row = V(spread_ints)(x + 4 * unit);
            const __m256i own = kind == Q8_0 ? V(pairs)(units[unit], row) : UNSIGNED_PAIRS(units[unit], row);
            pairs = _mm256_add_epi16(pairs, own);
        }
        total = most == UNITS ? (INTS)pairs : total + V(add_pairs)(pairs);
    }
    /* GCC 12 would store the products of all rows on the stack, and add them later. */
    if (most == UNITS || most == 1) __asm__ volatile("" : "+x"(total));
#else
#pragma GCC unroll 8
    for (int unit = 0; unit < count; unit++) total = DOT(total, units[unit], V(spread_ints)(x + 4 * unit));
#endif
    return total;
}

/* Minus the zero points times the sum of a row's codes. Minus 8 times the sum fits 16 bits. */
INLINE INTS V(shift)(INTS zeros, const uint8_t *sum) { return TIMES(zeros, V(spread_ints)(sum)) >> 3; }

/* Add the products of a block of a tile to the running sums `found[rows, PARTS]`, with the `scale`, the `minimum`
   and the zero points of several blocks; rows are interleaved at `x`. A row's numbers are loaded once for all
   outputs of a tile, so only UNITS / PARTS units are unpacked at a time: as many as registers hold. */
INLINE void V(block)(const int kind, const uint8_t *block, const FLOATS *scales, const FLOATS *minima,
                     const INTS *zeros, const uint8_t *x, const int rows, FLOATS *found) {
    const int span = kind == Q6_K ? 4 : UNITS; /* units that share a scale */
    const int group = UNITS / PARTS < span ? UNITS / PARTS : span;
    const uint8_t *own = x + BLOCK * rows, *sums = own + 8 * rows, *codes = block + scale_bytes(kind);
#pragma GCC unroll 2
    for (int half = 0; half < UNITS / span; half++) {
        INTS totals[ROWS * PARTS];
        FLOATS scale[PARTS], minimum[PARTS];
#pragma GCC unroll 4
        for (int begin = half * span; begin < (half + 1) * span; begin += group) {
            INTS units[PARTS * UNITS];
            __asm__("" : "+r"(codes)); /* load again rather than keep codes of the next group */
#pragma GCC unroll 8
            for (int one = 0; one < PARTS * group; one++)
                units[one] = V(unpack)(kind, codes + 4 * LANES * (one / group), begin + one % group);
#pragma GCC unroll 8
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    INTS *total = totals + row * PARTS + part;
                    const uint8_t *sum = sums + 12 * row + (kind == Q6_K ? 4 + 4 * half : 0);
                    if (begin == half * span)
                        *total = V(pairs_of)(kind) == UNITS ? ALL_INTS(0) : V(offset)(kind, sum);
                    *total = V(dot)(kind, *total, units + part * group, group, x + BLOCK * row + 4 * begin);
                }
        }
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            const uint8_t *lane = block + LANES * part;
            scale[part] = scales[part];
            minimum[part] = minima[part];
            if (kind == Q6_K)
                scale[part] *= V(to_floats)(LOAD_SIGNED_BYTES(lane + WIDTH * half));
            else if (scale_bytes(kind)) {
                scale[part] *= V(to_floats)(LOAD_BYTES(lane));
                minimum[part] *= -V(to_floats)(LOAD_BYTES(lane + WIDTH));
            }
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const uint8_t *sum = sums + 12 * row;
                INTS total = totals[row * PARTS + part];
                FLOATS *to = found + row * PARTS + part;
#ifdef UNSIGNED_PAIRS
                if (V(pairs_of)(kind) == UNITS) total = V(add_pairs)((__m256i)total) + V(offset)(kind, sum);
#endif
                if (has_zero_point(kind)) total += V(shift)(zeros[part], sum);
                *to = FMA(V(to_floats)(total), scale[part] * V(spread)(own + 4 * row), *to);
                if (has_minimum(kind)) *to = FMA(minimum[part], V(spread)(own + 4 * rows + 4 * row), *to);
            }
    }
}

/* The outputs of `some` tiles, `bytes` apart, for rows that are interleaved at `x`: `found[some, rows, PARTS]`. */
INLINE void V(tiles)(const int kind, const struct job *job, const uint8_t *tile, const long bytes,
                     const int some, const uint8_t *x, const int rows, FLOATS *found) {
    const long supers = job->inputs / (BLOCK * blocks_of(kind));
#pragma GCC unroll 32
    for (int one = 0; one < some * rows * PARTS; one++) found[one] = ALL_FLOATS(0);
    for (long super = 0; super < supers; super++, tile += super_bytes(kind)) {
        FLOATS scale[FEW * PARTS], minimum[FEW * PARTS];
        INTS zeros[FEW * PARTS];
#pragma GCC unroll 16
        for (int one = 0; one < some * PARTS; one++) {
            const uint8_t *head = tile + one / PARTS * bytes;
            const int lane = LANES * (one % PARTS);
            scale[one] = LOAD_HALVES(head + 2 * lane);
            minimum[one] = has_minimum(kind) ? LOAD_HALVES(head + 2 * WIDTH + 2 * lane) : scale[one];
            zeros[one] = has_zero_point(kind) ? LOAD_BYTES(head + 2 * WIDTH + lane) : ALL_INTS(0);
        }
        const uint8_t *block = tile + head_bytes(kind);
        for (int number = 0; number < blocks_of(kind); number++, block += block_bytes(kind), x += SHARE * rows) {
            if (together(kind, rows) == 1)
#pragma GCC unroll 8
                for (long at = 0; at < block_bytes(kind); at += 64) __builtin_prefetch(block + AHEAD + at);
#pragma GCC unroll 4
            for (int one = 0; one < some; one++)
                V(block)(kind, block + one * bytes, scale + one * PARTS, minimum + one * PARTS,
                         zeros + one * PARTS, x, rows, found + one * rows * PARTS);
        }
    }
}

/* Write the results of the rows from `first` on: up to `count` outputs from `column` on; every PARTS-th of
   `found`. */
INLINE void V(write)(const struct job *job, long first, long some, long column, long count, const FLOATS *found) {
    for (long row = 0; row < some; row++, found += PARTS) {
        float *to = job->out + (first + row) * job->outputs + column, sums[LANES];
        if (count >= LANES) {
            V(store)(to, job->bias ? *found + V(load)(job->bias + column) : *found);
            continue;
        }
        V(store)(sums, *found);
        for (long one = 0; one < count; one++) to[one] = sums[one] + (job->bias ? job->bias[column + one] : 0);
    }
}

/* Tiles `from` to `to` of a part for interleaved rows. */
INLINE void V(few)(const int kind, const int rows, const struct job *job, const struct part *part,
                   const uint8_t *x, long first, long column, long from, long to) {
    const long bytes = job->inputs / (BLOCK * blocks_of(kind)) * super_bytes(kind);
    const int most = together(kind, rows);
    for (long number = from, step; number < to; number += step) {
        const uint8_t *tile = part->tiles + number * bytes;
        step = to - number < most ? 1 : most;
        FLOATS found[ROWS * PARTS];
        if (step > 1)
            V(tiles)(kind, job, tile, bytes, most, x, rows, found);
        else
            V(tiles)(kind, job, tile, bytes, 1, x, rows, found);
        for (long one = 0; one < step; one++)
            for (long lanes = 0; lanes < PARTS; lanes++) {
                const long output = (number + one) * WIDTH + lanes * LANES, left = part->outputs - output;
                const FLOATS *own = found + one * rows * PARTS + lanes;
                if (left > 0) V(write)(job, first, rows, column + output, left, own);
            }
    }
}

#define WITH(kind, rows)                                                                        \
    case rows: V(few)(kind, rows, job, part, x, first, column, from, to); break;

#define LOOP(kind)                                                                              \
    WITHIN static void V(loop_##kind)(const struct job *job, const struct part *part,           \
                                      const uint8_t *x, long first, long some, long column,     \
                                      long from, long to) {                                     \
        switch (some) {                                                                         \
            WITH(kind, 1) WITH(kind, 2) WITH(kind, 3) WITH(kind, 4)                             \
            WITH(kind, 5) WITH(kind, 6) WITH(kind, 7) WITH(kind, 8)                             \
        }                                                                                       \
    }
FOR_KINDS(LOOP)

/* Tiles of a part for any number of rows: each tile is read for all rows before the next one. */
static void V(part)(const struct job *job, const struct part *part, const uint8_t *x, long begin, long rows,
                    long column, long from, long to) {
    const long row_bytes = job->inputs / BLOCK * SHARE, step = rows > ROWS ? 1 : to - from;
    for (long number = from; number < to; number += step)
        for (long row = 0; row < rows; row += ROWS) {
            const long some = rows - row < ROWS ? rows - row : ROWS;
            switch (part->kind) {
#define RUN(kind)                                                                               \
    case kind:                                                                                  \
        V(loop_##kind)(job, part, x + row * row_bytes, begin + row, some, column, number,       \
                       number + step);                                                          \
        break;
                FOR_KINDS(RUN)
#undef RUN
            }
        }
}

#undef WITH
