/* Products of up to 16 rows with tiles, for one KIND of numbers; see tiles.c. */

enum { OF(SEGMENT) = 256 }; /* units that are added up by themselves, for smaller roundings */

/* Rows `first` to `first + rows` with tile `number`; `x` has their units side by side. */
WITHIN static inline __attribute__((always_inline)) void OF(tile)(
    const struct job *job, const int32_t *x, long first, const int rows, long number) {
    const char *tile = job->tiles + 64 * number * job->units;
    const long output = WIDTH * number;
    SUM sums[ROWS], totals[ROWS];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) totals[row] = NONE;
    for (long begin = 0; begin < job->units; begin += OF(SEGMENT)) {
        const long left = job->units - begin, end = begin + (left < OF(SEGMENT) ? left : OF(SEGMENT));
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) sums[row] = NONE;
        for (long unit = begin; unit < end; unit++) {
            const __m512i own = _mm512_loadu_si512(tile + 64 * unit);
            if (rows > 4) _mm_prefetch(tile + 64 * unit + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++)
                sums[row] = DOT(sums[row], own, _mm512_set1_epi32(x[unit * rows + row]));
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) totals[row] = PLUS(totals[row], sums[row]);
    }
/* One by one: unrolled, this takes registers that GCC 12 then lacks for the tile of 12 rows or more. */
#pragma GCC unroll 1
    for (int row = 0; row < rows; row++) {
        __m512 found = FINISHED(job, totals[row], first + row, output);
        if (job->bias) found = _mm512_add_ps(found, _mm512_loadu_ps(job->bias + output));
        STORE(job->out, (first + row) * job->outputs + output, found);
    }
}

#define FOR(count)                                                                              \
    case count:                                                                                 \
        for (; from < to; from++) OF(tile)(job, x, first, count, from);                         \
        break;

/* The same with tiles `from` to `to`: a loop for each number of rows. */
WITHIN static void OF(few)(const struct job *job, const int32_t *x, long first, long rows, long from,
                           long to) {
    switch (rows) {
        FOR(1) FOR(2) FOR(3) FOR(4) FOR(5) FOR(6) FOR(7) FOR(8)
        FOR(9) FOR(10) FOR(11) FOR(12) FOR(13) FOR(14) FOR(15) FOR(16)
    }
}

/* The same for any number of rows: each tile is read for all of them, before the next one is. */
static void OF(tiles)(const struct job *job, const int32_t *x, long first, long rows, long from, long to) {
    const long step = rows > ROWS ? 1 : to - from;
    for (long number = from; number < to; number += step)
        for (long row = 0; row < rows; row += ROWS)
            OF(few)(job, x + row * job->units, first + row, rows - row < ROWS ? rows - row : ROWS,
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
