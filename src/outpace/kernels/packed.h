/* Products of up to 16 rows with tiles of packed matrices, for one instruction set; see packed.c. */

/* Unpack the codes of a block for LANES outputs, by unit; `high` has the bits above the fourth. */
INLINE void V(unpack)(const int kind, const uint8_t *block, INTS *units) {
    const INTS low = ALL_INTS(0x0f0f0f0f), mask = ALL_INTS(bits_of(kind) == 6 ? 0x30303030 : 0x10101010);
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
        if (kind == Q8_0) {
            units[unit] = V(load_ints)(block + 64 * unit);
            if (SIGNED_CODES) units[unit] ^= ALL_INTS(0x80808080);
            continue;
        }
        const INTS both = V(load_ints)(block + 64 * (unit % 4));
        units[unit] = (unit < 4 ? both : both >> 4) & low;
        if (bits_of(kind) == 4) continue;
        const INTS high = V(load_ints)(block + 256 + (bits_of(kind) == 6 ? 64 * (unit / 4) : 0));
        const int by = bits_of(kind) == 6 ? 2 * (unit % 4) - 4 : unit - 4; /* bits down, or up below 0 */
        units[unit] |= (by < 0 ? high << -by : high >> by) & mask;
    }
}

/* Sums of the products of some units with a row, minus the contribution of the code of zero. */
INLINE INTS V(dot)(const int kind, const INTS *units, const int from, const int to, const uint8_t *x,
                   const uint8_t *sum) {
    INTS total = ALL_INTS(0);
    if (zero_of(kind) && !(kind == Q8_0 && SIGNED_CODES)) {
        total = V(spread_ints)(sum);
        if (bits_of(kind) > 4) total <<= bits_of(kind) - 4;
    }
#ifdef UNSIGNED_PAIRS
    /* 16 bits hold the sums of 8 pairs of 4 bits, 4 of 5 bits, 2 of 6 bits, and 1 of 8 bits. */
    const int most = kind == Q8_0 ? 1 : bits_of(kind) == 4 ? 8 : bits_of(kind) == 5 ? 4 : 2;
#pragma GCC unroll 8
    for (int begin = from; begin < to; begin += most) {
        __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int unit = begin; unit < (begin + most < to ? begin + most : to); unit++) {
            const INTS row = V(spread_ints)(x + 4 * unit);
            const __m256i own = kind == Q8_0 ? V(pairs)(units[unit], row) : UNSIGNED_PAIRS(units[unit], row);
            pairs = _mm256_add_epi16(pairs, own);
        }
        total += V(add_pairs)(pairs);
    }
#else
#pragma GCC unroll 8
    for (int unit = from; unit < to; unit++) total = DOT(total, units[unit], V(spread_ints)(x + 4 * unit));
#endif
    return total;
}

/* Minus the zero points times the sum of a row's codes. Minus 8 times the sum fits 16 bits. */
INLINE INTS V(shift)(INTS zeros, const uint8_t *sum) { return TIMES(zeros, V(spread_ints)(sum)) >> 3; }

/* LANES outputs of a block, from `lane` on, with the `scale` and the `minimum` of several blocks and their
   zero points; rows are interleaved at `x`, and `found` are their running sums. */
INLINE void V(block)(const int kind, const uint8_t *block, FLOATS scale, FLOATS minimum, INTS zeros,
                     const uint8_t *x, const int rows, const int lane, FLOATS *found) {
    FLOATS other = scale;
    INTS units[UNITS];
    if (kind == Q6_K) {
        other *= V(to_floats)(LOAD_SIGNED_BYTES(block + WIDTH + lane));
        scale *= V(to_floats)(LOAD_SIGNED_BYTES(block + lane));
    } else if (scale_bytes(kind)) {
        scale *= V(to_floats)(LOAD_BYTES(block + lane));
        minimum *= V(to_floats)(LOAD_BYTES(block + WIDTH + lane));
    }
    V(unpack)(kind, block + scale_bytes(kind) + 4 * lane, units);
    const uint8_t *own = x + BLOCK * rows, *sums = own + 8 * rows;
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
        const FLOATS step = V(spread)(own + 4 * row);
        if (kind == Q6_K) {
            const INTS left = V(dot)(kind, units, 0, 4, x + BLOCK * row, sums + 12 * row + 4);
            const INTS right = V(dot)(kind, units, 4, 8, x + BLOCK * row, sums + 12 * row + 8);
            found[row] = FMA(V(to_floats)(left), scale * step, found[row]);
            found[row] = FMA(V(to_floats)(right), other * step, found[row]);
            continue;
        }
        INTS sum = V(dot)(kind, units, 0, 8, x + BLOCK * row, sums + 12 * row);
        if (has_zero_point(kind)) sum += V(shift)(zeros, sums + 12 * row);
        found[row] = FMA(V(to_floats)(sum), scale * step, found[row]);
        if (!has_minimum(kind)) continue;
        const FLOATS whole = V(spread)(own + 4 * rows + 4 * row);
        found[row] = FMA(scale_bytes(kind) ? -minimum : minimum, whole, found[row]);
    }
}

/* LANES outputs of `some` tiles, `bytes` apart, from `lane` on, for rows that are interleaved at `x`. */
INLINE void V(tiles)(const int kind, const struct job *job, const uint8_t *tile, const long bytes,
                     const int some, const uint8_t *x, const int rows, const int lane, FLOATS *found) {
    const long supers = job->inputs / (BLOCK * blocks_of(kind));
#pragma GCC unroll 16
    for (int one = 0; one < some * rows; one++) found[one] = ALL_FLOATS(0);
    for (long super = 0; super < supers; super++, tile += super_bytes(kind)) {
        FLOATS scale[FEW], minimum[FEW];
        INTS zeros[FEW];
#pragma GCC unroll 4
        for (int one = 0; one < some; one++) {
            const uint8_t *head = tile + one * bytes;
            scale[one] = LOAD_HALVES(head + 2 * lane);
            minimum[one] = has_minimum(kind) ? LOAD_HALVES(head + 2 * WIDTH + 2 * lane) : scale[one];
            zeros[one] = has_zero_point(kind) ? LOAD_BYTES(head + 2 * WIDTH + lane) : ALL_INTS(0);
        }
        const uint8_t *block = tile + head_bytes(kind);
        for (int number = 0; number < blocks_of(kind); number++, block += block_bytes(kind), x += SHARE * rows) {
            if (lane == 0 && together(kind, rows) == 1)
#pragma GCC unroll 8
                for (long at = 0; at < block_bytes(kind); at += 64) __builtin_prefetch(block + AHEAD + at);
#pragma GCC unroll 4
            for (int one = 0; one < some; one++)
                V(block)(kind, block + one * bytes, scale[one], minimum[one], zeros[one], x, rows, lane,
                         found + one * rows);
        }
    }
}

/* Write the results of the rows from `first` on: up to `count` outputs from `column` on. */
INLINE void V(write)(const struct job *job, long first, long some, long column, long count, const FLOATS *found) {
    for (long row = 0; row < some; row++) {
        float *to = job->out + (first + row) * job->outputs + column, sums[LANES];
        if (count >= LANES) {
            V(store)(to, job->bias ? found[row] + V(load)(job->bias + column) : found[row]);
            continue;
        }
        V(store)(sums, found[row]);
        for (long one = 0; one < count; one++) to[one] = sums[one] + (job->bias ? job->bias[column + one] : 0);
    }
}

/* Tiles `from` to `to` of a part for `some` rows, padded to `rows` interleaved ones. */
INLINE void V(few)(const int kind, const int rows, const struct job *job, const struct part *part,
                   const uint8_t *x, long first, long some, long column, long from, long to) {
    const long bytes = job->inputs / (BLOCK * blocks_of(kind)) * super_bytes(kind);
    const int most = together(kind, rows);
    for (long number = from, step; number < to; number += step) {
        const uint8_t *tile = part->tiles + number * bytes;
        step = to - number < most ? 1 : most;
        for (int lane = 0; lane < WIDTH; lane += LANES) {
            FLOATS found[ROWS];
            if (step > 1)
                V(tiles)(kind, job, tile, bytes, most, x, rows, lane, found);
            else
                V(tiles)(kind, job, tile, bytes, 1, x, rows, lane, found);
            for (long one = 0; one < step; one++) {
                const long output = (number + one) * WIDTH + lane, left = part->outputs - output;
                if (left > 0) V(write)(job, first, some, column + output, left, found + one * rows);
            }
        }
    }
}

#define WITH(kind, rows)                                                                        \
    case rows: V(few)(kind, rows, job, part, x, first, some, column, from, to); break;

#define LOOP(kind)                                                                              \
    WITHIN static void V(loop_##kind)(const struct job *job, const struct part *part,           \
                                      const uint8_t *x, long first, long some, long column,     \
                                      long from, long to) {                                     \
        switch (filled(some)) {                                                                 \
            WITH(kind, 1) WITH(kind, 2) WITH(kind, 4) WITH(kind, 8) WITH(kind, 12) WITH(kind, 16) \
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
