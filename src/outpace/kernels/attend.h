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

/* A page in float32: keys by number, then by slot; values by slot, `step` numbers apart. */
struct V(page) {
    float keys[SIZE * PAGE], widened[PAGE * SIZE];
    const float *values;
    long step;
};

/* Set the keys of a page from those of each slot, `step` numbers apart. */
INLINE void V(turn_keys)(struct V(page) *page, const float *keys, long step, long size) {
    for (long slot = 0; slot < PAGE; slot += LANES)
        for (long number = 0; number < size; number += LANES) {
            FLOATS block[LANES];
#pragma GCC unroll 16
            for (int row = 0; row < LANES; row++) block[row] = V(load)(keys + (slot + row) * step + number);
            V(transpose)(block);
#pragma GCC unroll 16
            for (int row = 0; row < LANES; row++) V(store)(page->keys + (number + row) * PAGE + slot, block[row]);
        }
}

/* Read the page whose first number of a head is `at`. */
INLINE void V(load_page)(const struct pass *pass, struct V(page) *page, long at) {
    if (pass->cached == FLOAT32) {
        V(turn_keys)(page, (const float *)pass->keys + at, pass->slot, pass->size);
        page->values = (const float *)pass->values + at, page->step = pass->slot;
        return;
    }
    V(widen)(pass, pass->keys, at, PAGE, page->widened);
    V(turn_keys)(page, page->widened, pass->size, pass->size);
    V(widen)(pass, pass->values, at, PAGE, page->widened);
    page->values = page->widened, page->step = pass->size;
}

/* Rows and heads whose sums fill the registers. */
#define TILE (PARTS == 1 ? 12 : 6)

/* Add to the sums of each row the products of its numbers with vectors that are `step` numbers apart. */
INLINE void V(add_products)(FLOATS *const *sums, int rows, const float *const *numbers, const float *vectors,
                            long step, long count) {
    FLOATS found[TILE][PARTS];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PARTS; part++) found[row][part] = sums[row][part];
    for (long n = 0; n < count; n++) {
        FLOATS vector[PARTS];
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) vector[part] = V(load)(vectors + n * step + LANES * part);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            const FLOATS number = V(spread)(numbers[row] + n);
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) found[row][part] = FMA(number, vector[part], found[row][part]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < PARTS; part++) sums[row][part] = found[row][part];
}

/* Turn the scores of visible slots into weights; fade what a row has if one of them is larger. */
INLINE void V(weigh)(struct V(state) *state, const FLOATS *scores, unsigned mask, long registers, float *weights) {
    FLOATS visible[PARTS], most = ALL_FLOATS(-__builtin_inff());
    INTS seen[PARTS];
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        seen[part] = (ALL_INTS(mask) & V(load_ints)(BITS + LANES * part)) != 0;
        visible[part] = mask == 0xffff ? scores[part]
                                       : V(select)(seen[part], scores[part], ALL_FLOATS(-__builtin_inff()));
        most = MAX(most, visible[part]);
    }
    const float largest = LARGEST(most);
    if (!(largest <= state->top)) {
        const FLOATS fade = V(power)(ALL_FLOATS(state->top - largest));
        for (int part = 0; part < PARTS; part++) state->weights[part] *= fade;
        for (long chunk = 0; chunk < registers; chunk++) state->sums[chunk] *= fade;
        state->top = largest;
    }
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        FLOATS own = V(power)(visible[part] - state->top);
        if (mask != 0xffff) own = V(select)(seen[part], own, ALL_FLOATS(0));
        V(store)(weights + LANES * part, own);
        state->weights[part] += own;
    }
}

/* Accumulate the visible slots of a page for some rows and heads, which all see it whole if they are many. */
INLINE void V(look)(struct V(state) *const *states, int rows, const struct V(page) *page, long size, unsigned mask) {
    FLOATS scores[TILE][PARTS], *sums[TILE];
    float weights[TILE][PAGE];
    const float *numbers[TILE];
    for (int row = 0; row < rows; row++) {
        numbers[row] = (const float *)states[row]->row, sums[row] = scores[row];
        for (int part = 0; part < PARTS; part++) scores[row][part] = ALL_FLOATS(0);
    }
    V(add_products)(sums, rows, numbers, page->keys, PAGE, size);
    for (int row = 0; row < rows; row++) {
        V(weigh)(states[row], scores[row], mask, size / LANES, weights[row]);
        numbers[row] = weights[row];
    }
    for (long chunk = 0; chunk < size / LANES; chunk += PARTS) {
        const float *values = page->values + LANES * chunk;
        for (int row = 0; row < rows; row++) sums[row] = states[row]->sums + chunk;
        if (mask == 0xffff)
            V(add_products)(sums, rows, numbers, values, page->step, PAGE);
        else /* values outside the mask may be NaN */
            for (unsigned left = mask; left; left &= left - 1) {
                const long slot = __builtin_ctz(left);
                const float *own = numbers[0] + slot;
                V(add_products)(sums, 1, &own, values + slot * page->step, 0, 1);
            }
    }
}

WITHIN static void V(look_masked)(struct V(state) *state, const struct V(page) *page, long size, unsigned mask) {
    V(look)(&state, 1, page, size, mask);
}

/* Accumulate a page that `count` rows and heads see whole. */
WITHIN static void V(look_together)(struct V(state) *const *states, long count, const struct V(page) *page, long size) {
    for (; count >= TILE; count -= TILE, states += TILE) V(look)(states, TILE, page, size, 0xffff);
    for (; count >= TILE / 2; count -= TILE / 2, states += TILE / 2) V(look)(states, TILE / 2, page, size, 0xffff);
    for (; count; count--, states++) V(look)(states, 1, page, size, 0xffff);
}

/* Accumulate a page of values for the heads of a row, after its keys are set. */
WITHIN static void V(look_joined)(struct V(state) *states, long heads, struct V(page) *page, const float *keys,
                                  long size, unsigned mask) {
    V(turn_keys)(page, keys, size, size);
    for (long head = 0; head < heads; head++) V(look_masked)(&states[head], page, size, mask);
}

/* Accumulate the slots from the root's page on that a row of a tree sees, side by side: they are summed
   as the same tokens are in a text without other branches. */
INLINE void V(look_along_branch)(const struct pass *pass, struct V(state) *states, const int64_t *pages,
                                 long row, long heads, long kv_head, long stop) {
    float keys[PAGE * SIZE];
    struct V(page) joined = {.step = pass->size};
    joined.values = joined.widened;
    const long begin = pass->trunk[row] / PAGE;
    const long lane = pass->low[row] > begin * PAGE ? pass->low[row] % PAGE : 0;
    long place = lane;
    unsigned mask = 0;
    for (long page = begin; page * PAGE < stop; page++) {
        const long at = pages[page] * PAGE * pass->slot + kv_head * pass->head;
        for (unsigned left = seen(pass, row, page * PAGE); left; left &= left - 1) {
            const long from = at + __builtin_ctz(left) * pass->slot, to = place * pass->size;
            V(widen)(pass, pass->keys, from, 1, keys + to);
            V(widen)(pass, pass->values, from, 1, joined.widened + to);
            mask |= 1u << place++;
            if (place < PAGE) continue;
            V(look_joined)(states, heads, &joined, keys, pass->size, mask);
            place = mask = 0;
        }
    }
    if (mask) V(look_joined)(states, heads, &joined, keys, pass->size, mask);
}

/* Attention of rows `first` to `end` of one sequence, for heads `from` to `to` of one key head. */
WITHIN static void V(attend)(const struct pass *pass, const int64_t *pages, long first, long end,
                             long from, long to, long kv_head) {
    const long bytes = pass->half ? 2 : 4, registers = pass->size / LANES, heads = to - from;
    struct V(state) states[STATES], *whole[STATES];
    struct V(page) loaded;
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
        const int is_last = (page + 1) * PAGE >= stop;
        const long next = is_last ? at : at + (pages[page + 1] - pages[page]) * PAGE * pass->slot;
        if (!is_last) prefetch_page(pass, pass->keys, next);
        V(load_page)(pass, &loaded, at);
        if (!is_last) prefetch_page(pass, pass->values, next);
        long count = 0;
        for (long row = first; row < end; row++) {
            if (is_branch(pass, row) && page >= pass->trunk[row] / PAGE) continue;
            const unsigned mask = seen(pass, row, page * PAGE);
            for (long head = 0; mask && head < heads; head++) {
                struct V(state) *state = &states[(row - first) * heads + head];
                if (mask == 0xffff)
                    whole[count++] = state;
                else
                    V(look_masked)(state, &loaded, pass->size, mask);
            }
        }
        V(look_together)(whole, count, &loaded, pass->size);
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
