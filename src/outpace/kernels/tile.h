/* Products of a few rows with tiles, for one instruction set and KIND of numbers, whose sums are SUMs;
   see tiles.c. */

#ifndef SUM
#define SUM FLOATS
#endif
#define OF(name) JOINED(name, JOINED(KIND, ISA))

#define ROWS (LANES == 16 ? 16 : 4) /* rows that share the loads of a tile: their sums fill half of the registers */

enum { OF(rows) = ROWS };

/* Add the products of four bytes per lane, of a tile and of the row at `x`. */
INLINE SUM OF(multiply)(SUM sum, INTS tile, const int32_t *x) {
    const FLOATS low = (FLOATS)(tile << 16), high = (FLOATS)(tile & ~0xffff); /* of two bfloat16 */
    switch (KIND) {
#ifdef DOT
        case I8: return (SUM)DOT((INTS)sum, SIGNED_CODES ? tile ^ OFFSET : tile, V(spread_ints)(x));
#endif
#ifdef BF16_DOT
        case BF16: return (SUM)BF16_DOT((FLOATS)sum, tile, V(spread_ints)(x));
#endif
        case WIDE: return (SUM)FMA(high, V(spread)(x + 1), FMA(low, V(spread)(x), (FLOATS)sum));
        default: return (SUM)FMA((FLOATS)tile, V(spread)(x), (FLOATS)sum);
    }
}

/* Write the sums of LANES outputs from `at` on of a row. */
INLINE void OF(finish)(const struct job *job, SUM sum, long row, long at) {
    FLOATS found = (FLOATS)sum;
#ifdef DOT
    if (KIND == I8) {
        const int32_t offset = SIGNED_CODES ? 0 : job->row_sum[row];
        found = V(to_floats)((INTS)sum - offset) * V(load)(job->scale + at) * job->row_scale[row];
    }
#endif
    if (job->bias) found += V(load)(job->bias + at);
    const long place = row * job->outputs + at;
    if (KIND == BF16 || KIND == WIDE)
        V(store_bfloats)((uint16_t *)job->out + place, found);
    else
        V(store)((float *)job->out + place, found);
}

/* Rows `first` to `first + rows` with `some` tiles from `number` on; `x` interleaves their units. */
INLINE void OF(tile)(const struct job *job, const int32_t *x, long first, const int rows, long number,
                     const int some) {
    const long units = job->units, bytes = 64 * units, words = KIND == WIDE ? 2 : 1;
    const char *tiles = job->tiles + number * bytes;
    const int count = some * PARTS * rows;
    SUM sums[16], totals[16];
#pragma GCC unroll 16
    for (int one = 0; one < count; one++) totals[one] = (SUM)ALL_INTS(0);
    for (long begin = 0; begin < units; begin += SEGMENT) {
        const long left = units - begin, end = begin + (left < SEGMENT ? left : SEGMENT);
#pragma GCC unroll 16
        for (int one = 0; one < count; one++) sums[one] = (SUM)ALL_INTS(0);
        for (long unit = begin; unit < end; unit++) {
#pragma GCC unroll 16
            for (int one = 0; one < some * PARTS; one++) {
                const char *place = tiles + one / PARTS * bytes + 64 * unit;
                const INTS own = V(load_ints)(place + 4 * LANES * (one % PARTS));
                if (rows > 4) __builtin_prefetch(place + AHEAD);
#pragma GCC unroll 16
                for (int row = 0; row < rows; row++)
                    sums[one * rows + row] =
                        OF(multiply)(sums[one * rows + row], own, x + words * (unit * rows + row));
            }
        }
#pragma GCC unroll 16
        for (int one = 0; one < count; one++) totals[one] += sums[one];
    }
/* Not unrolled: GCC 12 would then spill registers of the tile of 12 rows or more. */
#pragma GCC unroll 1
    for (int one = 0; one < count; one++)
        OF(finish)(job, totals[one], first + one % rows, number * WIDTH + one / rows * LANES);
}

#define FOR(count, some)                                                                    \
    case count:                                                                             \
        for (; from + some <= to; from += some) OF(tile)(job, x, first, count, from, some); \
        for (; from < to; from++) OF(tile)(job, x, first, count, from, 1);                  \
        break;

/* Up to ROWS rows with tiles `from` to `to`: one loop per number of rows. Few rows take several tiles at a
   time to hide the latency of each sum. */
WITHIN static void OF(few)(const struct job *job, const int32_t *x, long first, long rows, long from, long to) {
    switch (rows) {
#if LANES == 16
        FOR(1, 4) FOR(2, 4) FOR(3, 2) FOR(4, 2) FOR(5, 1) FOR(6, 1) FOR(7, 1) FOR(8, 1)
        FOR(9, 1) FOR(10, 1) FOR(11, 1) FOR(12, 1) FOR(13, 1) FOR(14, 1) FOR(15, 1) FOR(16, 1)
#else
        FOR(1, 4) FOR(2, 2) FOR(3, 1) FOR(4, 1)
#endif
    }
}

/* Any number of rows with tiles `from` to `to`: each tile is read for all rows before the next one. */
static void OF(tiles)(const struct job *job, const int32_t *x, long first, long rows, long from, long to) {
    const long step = rows > ROWS ? 1 : to - from;
    for (long number = from; number < to; number += step)
        for (long row = 0; row < rows; row += ROWS)
            OF(few)(job, x + row * job->words, first + row, rows - row < ROWS ? rows - row : ROWS, number,
                    number + step);
}

#undef KIND
#undef SUM
#undef OF
#undef ROWS
#undef FOR
