/* Products of up to 16 rows with tiles, for one KIND of numbers; see tiles.c. */

enum { OF(SEGMENT) = 256 }; /* units that are summed separately, for smaller rounding errors */

/* Rows `first` to `first + rows` with `some` tiles from `number` on; `x` interleaves their units. */
WITHIN static inline __attribute__((always_inline)) void OF(tile)(
    const struct job *job, const int32_t *x, long first, const int rows, long number, const int some) {
    const long units = job->units, output = WIDTH * number, bytes = 64 * units;
    const char *tiles = job->tiles + number * bytes;
    SUM sums[ROWS], totals[ROWS];
#pragma GCC unroll 16
    for (int one = 0; one < some * rows; one++) totals[one] = NONE;
    for (long begin = 0; begin < units; begin += OF(SEGMENT)) {
        const long left = units - begin, end = begin + (left < OF(SEGMENT) ? left : OF(SEGMENT));
#pragma GCC unroll 16
        for (int one = 0; one < some * rows; one++) sums[one] = NONE;
        for (long unit = begin; unit < end; unit++) {
#pragma GCC unroll 4
            for (int tile = 0; tile < some; tile++) {
                const char *place = tiles + tile * bytes + 64 * unit;
                const __m512i own = _mm512_loadu_si512(place);
                if (rows > 4) _mm_prefetch(place + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 16
                for (int row = 0; row < rows; row++)
                    sums[tile * rows + row] = DOT(sums[tile * rows + row], own, x, unit * rows + row);
            }
        }
#pragma GCC unroll 16
        for (int one = 0; one < some * rows; one++) totals[one] = PLUS(totals[one], sums[one]);
    }
/* Not unrolled: GCC 12 would then spill registers of the tile of 12 rows or more. */
#pragma GCC unroll 1
    for (int one = 0; one < some * rows; one++) {
        const long row = first + one % rows, at = output + WIDTH * (one / rows);
        __m512 found = FINISHED(job, totals[one], row, at);
        if (job->bias) found = _mm512_add_ps(found, _mm512_loadu_ps(job->bias + at));
        STORE(job->out, row * job->outputs + at, found);
    }
}

#define FOR(count, some)                                                                        \
    case count:                                                                                 \
        for (; from + some <= to; from += some) OF(tile)(job, x, first, count, from, some);     \
        for (; from < to; from++) OF(tile)(job, x, first, count, from, 1);                      \
        break;

/* Up to 16 rows with tiles `from` to `to`: one loop per number of rows. Few rows take several tiles at a
   time to hide the latency of each sum. */
WITHIN static void OF(few)(const struct job *job, const int32_t *x, long first, long rows, long from,
                           long to) {
    switch (rows) {
        FOR(1, 4) FOR(2, 4) FOR(3, 2) FOR(4, 2) FOR(5, 1) FOR(6, 1) FOR(7, 1) FOR(8, 1)
        FOR(9, 1) FOR(10, 1) FOR(11, 1) FOR(12, 1) FOR(13, 1) FOR(14, 1) FOR(15, 1) FOR(16, 1)
    }
}

/* Any number of rows with tiles `from` to `to`: each tile is read for all rows before the next one. */
static void OF(tiles)(const struct job *job, const int32_t *x, long first, long rows, long from, long to) {
    const long step = rows > ROWS ? 1 : to - from;
    for (long number = from; number < to; number += step)
        for (long row = 0; row < rows; row += ROWS)
            OF(few)(job, x + row * job->words, first + row, rows - row < ROWS ? rows - row : ROWS,
                    number, number + step);
}

#undef KIND
#undef TARGET
#undef SUM
#undef NONE
#undef PLUS
#undef DOT
#undef FINISHED
#undef STORE
#undef FOR
