/* Products of up to 16 rows with tiles of packed matrices, for one instruction set (ISA); see packed.c. */

#define WITHIN __attribute__((target(TARGET)))
#define INLINE WITHIN static inline __attribute__((always_inline))

/* Unpack the codes of a block for LANES outputs, by unit; `high` has the bits above the fourth. */
INLINE void OF(unpack)(const int kind, const uint8_t *block, INT *units) {
    const INT low = V(set1_epi8)(15), mask = V(set1_epi8)(bits_of(kind) == 6 ? 48 : 16);
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
        if (kind == Q8_0) {
            units[unit] = LOAD(block + 64 * unit);
            continue;
        }
        const INT both = LOAD(block + 64 * (unit % 4));
        units[unit] = AND(unit < 4 ? both : V(srli_epi16)(both, 4), low);
        if (bits_of(kind) == 4) continue;
        const INT high = LOAD(block + 256 + (bits_of(kind) == 6 ? 64 * (unit / 4) : 0));
        const int by = bits_of(kind) == 6 ? 2 * (unit % 4) - 4 : unit - 4; /* bits down, or up below 0 */
        const INT moved = by < 0 ? V(slli_epi16)(high, -by) : V(srli_epi16)(high, by);
        units[unit] = OR(units[unit], AND(moved, mask));
    }
}

/* Sums of the products of some units with a row, minus the contribution of the code of zero. */
#if LANES == 16
INLINE INT OF(dot)(const int kind, const INT *units, const int from, const int to, const uint8_t *x,
                   const uint8_t *sum) {
    INT total = ZERO;
    int32_t four;
    if (zero_of(kind)) {
        memcpy(&four, sum, 4);
        total = V(set1_epi32)(four);
        if (bits_of(kind) > 4) total = V(slli_epi32)(total, bits_of(kind) - 4);
    }
#pragma GCC unroll 8
    for (int unit = from; unit < to; unit++) {
        memcpy(&four, x + 4 * unit, 4);
        total = V(dpbusd_epi32)(total, units[unit], V(set1_epi32)(four));
    }
    return total;
}
#else
/* Pairs of products are added in 16 bits, enough for 8 pairs of 4 bits, 4 of 5 bits and 2 of 6 bits. For
   8 bits they fit one pair of signed codes, whose sign is moved to the row. */
INLINE INT OF(dot)(const int kind, const INT *units, const int from, const int to, const uint8_t *x,
                   const uint8_t *sum) {
    const int most = kind == Q8_0 ? 1 : bits_of(kind) == 4 ? 8 : bits_of(kind) == 5 ? 4 : 2;
    const INT ones = V(set1_epi16)(1);
    INT total = ZERO;
    int32_t four;
    if (zero_of(kind) && kind != Q8_0) {
        memcpy(&four, sum, 4);
        total = V(set1_epi32)(four);
        if (bits_of(kind) > 4) total = V(slli_epi32)(total, bits_of(kind) - 4);
    }
#pragma GCC unroll 8
    for (int begin = from; begin < to; begin += most) {
        INT pairs = ZERO;
#pragma GCC unroll 8
        for (int unit = begin; unit < (begin + most < to ? begin + most : to); unit++) {
            memcpy(&four, x + 4 * unit, 4);
            INT row = V(set1_epi32)(four), own = units[unit];
            if (kind == Q8_0) {
                own = _mm256_xor_si256(own, V(set1_epi8)(-128));
                row = V(sign_epi8)(row, own);
                own = V(abs_epi8)(own);
            }
            pairs = V(add_epi16)(pairs, V(maddubs_epi16)(own, row));
        }
        total = V(add_epi32)(total, V(madd_epi16)(pairs, ones));
    }
    return total;
}
#endif

/* Broadcast one number of a row to all lanes. */
INLINE FLOAT OF(all)(const uint8_t *from) {
    float one;
    memcpy(&one, from, 4);
    return V(set1_ps)(one);
}

/* Minus the zero points times the sum of a row's codes. Minus 8 times the sum fits 16 bits. */
INLINE INT OF(shift)(const INT zeros, const uint8_t *sum) {
    int32_t eight;
    memcpy(&eight, sum, 4);
    return V(srai_epi32)(V(madd_epi16)(zeros, V(set1_epi32)(eight)), 3);
}

/* A block of LANES outputs of a tile, from `lane` on, with the `shared` scale and the `least` minimum of
   several blocks and their zero points; rows are interleaved at `x`, and their running sums are `found`. */
INLINE void OF(block)(const int kind, const uint8_t *block, const FLOAT shared, const FLOAT least,
                      const INT zeros, const uint8_t *x, const int rows, const int lane, FLOAT *found) {
    FLOAT scale = shared, other = shared, minimum = least;
    INT units[UNITS];
    if (kind == Q6_K) {
        scale = V(mul_ps)(shared, V(cvtepi32_ps)(SIGNED(block + lane)));
        other = V(mul_ps)(shared, V(cvtepi32_ps)(SIGNED(block + WIDTH + lane)));
    } else if (scale_bytes(kind)) {
        scale = V(mul_ps)(shared, V(cvtepi32_ps)(BYTES(block + lane)));
        minimum = V(mul_ps)(least, V(cvtepi32_ps)(BYTES(block + WIDTH + lane)));
    }
    if (lane == 0 && together(kind, rows) == 1)
#pragma GCC unroll 8
        for (long at = 0; at < block_bytes(kind); at += 64)
            _mm_prefetch((const char *)block + AHEAD + at, _MM_HINT_T0);
    OF(unpack)(kind, block + scale_bytes(kind) + 4 * lane, units);
    const uint8_t *own = x + BLOCK * rows, *sums = own + 8 * rows;
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
        const FLOAT step = OF(all)(own + 4 * row);
        if (kind == Q6_K) {
            const INT left = OF(dot)(kind, units, 0, 4, x + BLOCK * row, sums + 12 * row + 4);
            const INT right = OF(dot)(kind, units, 4, 8, x + BLOCK * row, sums + 12 * row + 8);
            found[row] = V(fmadd_ps)(V(cvtepi32_ps)(left), V(mul_ps)(scale, step), found[row]);
            found[row] = V(fmadd_ps)(V(cvtepi32_ps)(right), V(mul_ps)(other, step), found[row]);
            continue;
        }
        INT sum = OF(dot)(kind, units, 0, 8, x + BLOCK * row, sums + 12 * row);
        if (has_zero_point(kind)) sum = V(add_epi32)(sum, OF(shift)(zeros, sums + 12 * row));
        found[row] = V(fmadd_ps)(V(cvtepi32_ps)(sum), V(mul_ps)(scale, step), found[row]);
        if (!has_minimum(kind)) continue;
        const FLOAT whole = OF(all)(own + 4 * rows + 4 * row);
        found[row] = scale_bytes(kind) ? V(fnmadd_ps)(minimum, whole, found[row])
                                       : V(fmadd_ps)(minimum, whole, found[row]);
    }
}

/* LANES outputs of `some` tiles, `bytes` apart, for rows that are interleaved at `x`. */
INLINE void OF(tiles)(const int kind, const struct job *job, const uint8_t *tile, const long bytes,
                      const int some, const uint8_t *x, const int rows, const int lane, FLOAT *found) {
    const long supers = job->inputs / (BLOCK * blocks_of(kind));
#pragma GCC unroll 16
    for (int one = 0; one < some * rows; one++) found[one] = V(setzero_ps)();
    for (long super = 0; super < supers; super++, tile += super_bytes(kind)) {
        FLOAT shared[FEW], least[FEW];
        INT zeros[FEW];
        const uint8_t *block = tile + head_bytes(kind);
#pragma GCC unroll 4
        for (int one = 0; one < some; one++) {
            shared[one] = HALVES(tile + one * bytes + 2 * lane);
            least[one] = has_minimum(kind) ? HALVES(tile + one * bytes + 2 * WIDTH + 2 * lane) : shared[one];
            zeros[one] = has_zero_point(kind) ? BYTES(tile + one * bytes + 2 * WIDTH + lane) : ZERO;
        }
        for (int number = 0; number < blocks_of(kind); number++, block += block_bytes(kind)) {
#pragma GCC unroll 4
            for (int one = 0; one < some; one++)
                OF(block)(kind, block + one * bytes, shared[one], least[one], zeros[one], x, rows, lane,
                          found + one * rows);
            x += SHARE * rows;
        }
    }
}

/* Write the results of the rows from `first` on: `count` outputs from `column` on. */
INLINE void OF(write)(const struct job *job, long first, long some, long column, long count, FLOAT *found) {
    for (long row = 0; row < some; row++) {
        float *to = job->out + (first + row) * job->outputs + column, sums[LANES];
        if (count >= LANES) {
            FLOAT whole = found[row];
            if (job->bias) whole = V(add_ps)(whole, V(loadu_ps)(job->bias + column));
            V(storeu_ps)(to, whole);
            continue;
        }
        V(storeu_ps)(sums, found[row]);
        for (long one = 0; one < count; one++) to[one] = sums[one] + (job->bias ? job->bias[column + one] : 0);
    }
}

/* Tiles `from` to `to` of a part for `some` rows, padded to `rows` interleaved ones. */
INLINE void OF(few)(const int kind, const int rows, const struct job *job, const struct part *part,
                    const uint8_t *x, long first, long some, long column, long from, long to) {
    const long bytes = job->inputs / (BLOCK * blocks_of(kind)) * super_bytes(kind);
    const int most = together(kind, rows);
    for (long number = from; number < to;) {
        const long step = to - number < most ? 1 : most;
        for (int lane = 0; lane < WIDTH; lane += LANES) {
            FLOAT found[ROWS];
            if (step > 1)
                OF(tiles)(kind, job, part->tiles + number * bytes, bytes, most, x, rows, lane, found);
            else
                OF(tiles)(kind, job, part->tiles + number * bytes, bytes, 1, x, rows, lane, found);
            for (long one = 0; one < step; one++) {
                const long output = (number + one) * WIDTH + lane, left = part->outputs - output;
                if (left > 0) OF(write)(job, first, some, column + output, left, found + one * rows);
            }
        }
        number += step;
    }
}

#define WITH(kind, rows)                                                                        \
    case rows: OF(few)(kind, rows, job, part, x, first, some, column, from, to); break;

#define LOOP(kind)                                                                              \
    WITHIN static void OF(loop_##kind)(const struct job *job, const struct part *part,          \
                                       const uint8_t *x, long first, long some, long column,    \
                                       long from, long to) {                                    \
        switch (filled(some)) {                                                                 \
            WITH(kind, 1) WITH(kind, 2) WITH(kind, 4) WITH(kind, 8) WITH(kind, 12) WITH(kind, 16) \
        }                                                                                       \
    }
FOR_KINDS(LOOP)

/* Tiles of a part for any number of rows: each tile is read for all rows before the next one. */
static void OF(part)(const struct job *job, const struct part *part, const uint8_t *x, long begin,
                     long rows, long column, long from, long to) {
    const long row_bytes = job->inputs / BLOCK * SHARE, step = rows > ROWS ? 1 : to - from;
    for (long number = from; number < to; number += step)
        for (long row = 0; row < rows; row += ROWS) {
            const long some = rows - row < ROWS ? rows - row : ROWS;
            switch (part->kind) {
#define RUN(kind)                                                                               \
    case kind:                                                                                  \
        OF(loop_##kind)(job, part, x + row * row_bytes, begin + row, some, column, number,      \
                        number + step);                                                         \
        break;
                FOR_KINDS(RUN)
#undef RUN
            }
        }
}

#undef WITHIN
#undef INLINE
#undef WITH
#undef LOOP
#undef ISA
#undef TARGET
#undef LANES
#undef INT
#undef FLOAT
#undef V
#undef LOAD
#undef HALVES
#undef BYTES
#undef SIGNED
#undef AND
#undef OR
#undef ZERO
