/* Attention of some rows and heads, for one instruction set; see attend.c. */

/* Running state of a row and head: largest score, weights by lane, weighted sums of values; and the
   query, times the scale of scores. */
struct V(state) {
    float top;
    FLOATS weights[PARTS], row[SIZE / LANES], sums[SIZE / LANES];
};

INLINE FLOATS V(load_query)(const struct pass *pass, const char *from, long index) {
    return pass->half ? LOAD_BFLOATS(from + 2 * index) : V(load)(from + 4 * index);
}

/* Numbers of the cache, without their scale. */
INLINE FLOATS V(load_cached)(const struct pass *pass, const char *from, long index) {
    switch (pass->cached) {
        case BFLOAT16: return LOAD_BFLOATS(from + 2 * index);
        case FLOAT16: return LOAD_HALVES(from + 2 * index);
        case INT8: return V(to_floats)(LOAD_SIGNED_BYTES((const uint8_t *)from + index));
        default: return V(load)(from + 4 * index);
    }
}

/* Convert `count` slots of a head from number `at` on to float32, side by side. */
INLINE void V(widen)(const struct pass *pass, const char *from, long at, long count, float *to) {
    for (; count--; at += pass->slot, to += pass->size) {
        const FLOATS scale = pass->cached == INT8 ? V(spread)(from + at + pass->size) : ALL_FLOATS(1);
        for (long number = 0; number < pass->size; number += LANES)
            V(store)(to + number, V(load_cached)(pass, from, at + number) * scale);
    }
}

/* The sums of 16 vectors of 16 lanes, one per lane. */
INLINE void V(add_each)(FLOATS each[PAGE][PARTS], FLOATS *sums) {
    FLOATS four[4][PARTS];
    for (int n = 0; n < 4; n++)
        for (int part = 0; part < PARTS; part++)
            four[n][part] = V(add_lanes)(each[4 * n][part], each[4 * n + 1][part], each[4 * n + 2][part],
                                         each[4 * n + 3][part]);
    V(add_blocks)(four, sums);
}

/* Accumulate the visible slots of a page for a row and head; slots are `step` numbers apart. */
INLINE void V(look)(const struct pass *pass, struct V(state) *state, const float *keys, const float *values,
                    long step, unsigned mask) {
    const long registers = pass->size / LANES;
    FLOATS each[PAGE][PARTS], scores[PARTS], most = ALL_FLOATS(-__builtin_inff());
    for (long slot = 0; slot < PAGE; slot++) {
        const long at = slot * step;
        FLOATS sum[PARTS];
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            sum[part] = state->row[part] * V(load)(keys + at + LANES * part);
        for (long chunk = PARTS; chunk < registers; chunk += PARTS)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                sum[part] = FMA(state->row[chunk + part],
                                V(load)(keys + at + LANES * (chunk + part)), sum[part]);
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) each[slot][part] = sum[part];
    }
    V(add_each)(each, scores);
    INTS seen[PARTS];
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        seen[part] = (ALL_INTS(mask) & V(load_ints)(BITS + LANES * part)) != 0;
        scores[part] = V(select)(seen[part], scores[part], ALL_FLOATS(-__builtin_inff()));
        most = MAX(most, scores[part]);
    }
    const float largest = LARGEST(most);
    if (!(largest <= state->top)) {
        const FLOATS fade = V(power)(ALL_FLOATS(state->top - largest));
        for (int part = 0; part < PARTS; part++) state->weights[part] *= fade;
        for (long chunk = 0; chunk < registers; chunk++) state->sums[chunk] *= fade;
        state->top = largest;
    }
    float own[PAGE];
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        const FLOATS weights = V(select)(seen[part], V(power)(scores[part] - state->top), ALL_FLOATS(0));
        V(store)(own + LANES * part, weights);
        state->weights[part] += weights;
    }
    for (long chunk = 0; chunk < registers; chunk++) {
        FLOATS sum = state->sums[chunk];
        if (mask == 0xffff)
            for (long slot = 0; slot < PAGE; slot++)
                sum = FMA(ALL_FLOATS(own[slot]),
                          V(load)(values + slot * step + LANES * chunk), sum);
        else /* values outside the mask may be NaN */
            for (unsigned left = mask; left; left &= left - 1) {
                const long slot = __builtin_ctz(left);
                sum = FMA(ALL_FLOATS(own[slot]),
                          V(load)(values + slot * step + LANES * chunk), sum);
            }
        state->sums[chunk] = sum;
    }
}

/* Accumulate the slots from the root's page on that a row of a tree sees, side by side: they are summed
   as the same tokens are in a text without other branches. */
INLINE void V(look_along_branch)(const struct pass *pass, struct V(state) *states, const int64_t *pages,
                                 long row, long heads, long kv_head, long stop) {
    float keys[PAGE * SIZE], values[PAGE * SIZE];
    const long begin = pass->trunk[row] / PAGE;
    const long lane = pass->low[row] > begin * PAGE ? pass->low[row] % PAGE : 0;
    long place = lane;
    unsigned mask = 0;
    for (long page = begin; page * PAGE < stop; page++) {
        const long at = pages[page] * PAGE * pass->slot + kv_head * pass->head;
        for (unsigned left = seen(pass, row, page * PAGE); left; left &= left - 1) {
            const long from = at + __builtin_ctz(left) * pass->slot, to = place * pass->size;
            V(widen)(pass, pass->keys, from, 1, keys + to);
            V(widen)(pass, pass->values, from, 1, values + to);
            mask |= 1u << place++;
            if (place < PAGE) continue;
            for (long head = 0; head < heads; head++)
                V(look)(pass, &states[head], keys, values, pass->size, mask);
            place = mask = 0;
        }
    }
    for (long head = 0; mask && head < heads; head++)
        V(look)(pass, &states[head], keys, values, pass->size, mask);
}

/* Attention of rows `first` to `end` of one sequence, for heads `from` to `to` of one key head. */
WITHIN static void V(attend)(const struct pass *pass, const int64_t *pages, long first, long end,
                             long from, long to, long kv_head) {
    const long bytes = pass->half ? 2 : 4, registers = pass->size / LANES, heads = to - from;
    struct V(state) states[ROWS * HEADS];
    float wide_keys[PAGE * SIZE], wide_values[PAGE * SIZE];
    long low = INT64_MAX, stop = 0;
    for (long row = first; row < end; row++) {
        if (pass->low[row] < low) low = pass->low[row];
        if (pass->stop[row] > stop) stop = pass->stop[row];
        if (pass->bits && pass->own[row] >= stop) stop = pass->own[row] + 1;
        for (long head = from; head < to; head++) {
            struct V(state) *state = &states[(row - first) * heads + head - from];
            const char *q = pass->q + (row * pass->q_row + head * pass->q_head) * bytes;
            for (long chunk = 0; chunk < registers; chunk++) {
                state->row[chunk] = V(load_query)(pass, q, LANES * chunk) * pass->scale;
                state->sums[chunk] = ALL_FLOATS(0);
            }
            state->top = pass->sinks ? pass->sinks[head] * 1.4426950408889634f : -__builtin_inff();
            for (int part = 0; part < PARTS; part++) state->weights[part] = ALL_FLOATS(0);
            if (pass->sinks) state->weights[0][0] = 1;
        }
    }
    for (long page = low / PAGE; page * PAGE < stop; page++) {
        const long at = pages[page] * PAGE * pass->slot + kv_head * pass->head;
        if ((page + 1) * PAGE < stop) {
            const long pages_ahead = pages[page + 1] - pages[page];
            prefetch_page(pass, at + pages_ahead * PAGE * pass->slot);
        }
        const float *keys = wide_keys, *values = wide_values;
        long step = pass->size;
        if (pass->cached == FLOAT32) {
            keys = (const float *)pass->keys + at, values = (const float *)pass->values + at, step = pass->slot;
        } else {
            V(widen)(pass, pass->keys, at, PAGE, wide_keys);
            V(widen)(pass, pass->values, at, PAGE, wide_values);
        }
        for (long row = first; row < end; row++) {
            if (is_branch(pass, row) && page >= pass->trunk[row] / PAGE) continue;
            const unsigned mask = seen(pass, row, page * PAGE);
            for (long head = 0; mask && head < heads; head++)
                V(look)(pass, &states[(row - first) * heads + head], keys, values, step, mask);
        }
    }
    for (long row = first; row < end; row++)
        if (is_branch(pass, row))
            V(look_along_branch)(pass, &states[(row - first) * heads], pages, row, heads, kv_head, stop);
    for (long row = first; row < end; row++)
        for (long head = from; head < to; head++) {
            const struct V(state) *state = &states[(row - first) * heads + head - from];
            const float all = V(add_up)(state->weights);
            const long place = (row * pass->heads + head) * pass->size;
            for (long chunk = 0; chunk < registers; chunk++) {
                char *out = pass->out + (place + LANES * chunk) * bytes;
                if (pass->half)
                    V(store_bfloats)(out, state->sums[chunk] / all);
                else
                    V(store)(out, state->sums[chunk] / all);
            }
        }
}
