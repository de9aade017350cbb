/* The recurrent form of a gated delta layer for one instruction set; see gated_delta.c. */

/* A row to add to the state: `state = decay * state + key * values`, for some columns of values. */
struct V(update) {
    FLOATS decay, values[WIDE * PARTS];
    const float *key;
};

/* Columns of a state, and the rows that it does not contain yet. */
struct V(columns) {
    const float *from;
    long stride; /* between keys */
    int count;
    struct V(update) updates[PENDING + 1];
};

INLINE FLOATS V(exponential)(FLOATS x) { return V(power)(x * 1.4426950408889634f); }

/* x / (1 + exp(-x)) */
INLINE FLOATS V(silu)(FLOATS x) {
    const FLOATS part = V(exponential)(-MAX(x, -x));
    return V(select)(x < 0, x * part, x) / (part + 1);
}

/* The convolution of some columns of all rows of a sequence, which are multiples of WIDTH. */
INLINE void V(convolve)(const struct pass *pass, const struct sequence *own, long from, long count) {
    for (long column = from; column < from + count; column += LANES) {
        FLOATS factors[TAPS];
        for (long tap = 0; tap < pass->taps; tap++) {
            float each[LANES];
            for (long lane = 0; lane < LANES; lane++) each[lane] = pass->weight[(column + lane) * pass->taps + tap];
            factors[tap] = V(load)(each);
        }
        for (long row = 0; row < own->rows; row++) {
            FLOATS sum = ALL_FLOATS(0);
            for (long tap = 0; tap < pass->taps; tap++)
                sum = FMA(V(load)(find_input(pass, own, own->kept + row + tap) + column), factors[tap], sum);
            V(store)(mixed_row(pass, own->first + row) + column, V(silu)(sum));
        }
    }
    for (long row = own->begin; row < own->kept + own->rows + pass->taps - 1; row++)
        memcpy(own->next_inputs + (row - own->begin) * all_columns(pass) + from,
               find_input(pass, own, row) + from, 4 * count);
}

INLINE float V(dot)(const float *a, const float *b, long count) {
    FLOATS sums[PARTS];
    for (int part = 0; part < PARTS; part++) sums[part] = ALL_FLOATS(0);
    for (long at = 0; at < count; at += WIDTH)
        for (int part = 0; part < PARTS; part++)
            sums[part] = FMA(V(load)(a + at + LANES * part), V(load)(b + at + LANES * part), sums[part]);
    return V(add_up)(sums);
}

/* Scale the numbers of a head to length 1, times a factor. */
INLINE void V(normalise)(float *head, long count, FLOATS factor) {
    const FLOATS scale = factor / SQRT(ALL_FLOATS(V(dot)(head, head, count) + 1e-6f));
    for (long at = 0; at < count; at += LANES) V(store)(head + at, V(load)(head + at) * scale);
}

/* Read `size` rows of columns, with the updates that they lack. The result is written to `to` if it is not
   null, and multiplied by `key` and `query` if these are not null. */
INLINE void V(read_some)(const struct V(columns) *columns, const int parts, const int count, long size, float *to,
                         long stride, const float *key, const float *query, FLOATS *known, FLOATS *found) {
    for (int part = 0; part < parts; part++) known[part] = found[part] = ALL_FLOATS(0);
    for (long row = 0; row < size; row++) {
        FLOATS state[WIDE * PARTS];
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++)
            state[part] = V(load)(columns->from + row * columns->stride + LANES * part);
        for (int number = 0; number < count; number++) {
            const struct V(update) *update = columns->updates + number;
            const FLOATS own = V(spread)(update->key + row);
#pragma GCC unroll 8
            for (int part = 0; part < parts; part++)
                state[part] = FMA(own, update->values[part], update->decay * state[part]);
        }
        if (to)
#pragma GCC unroll 8
            for (int part = 0; part < parts; part++) V(store)(to + row * stride + LANES * part, state[part]);
        if (!key) continue;
        const FLOATS own = V(spread)(key + row), other = V(spread)(query + row);
#pragma GCC unroll 8
        for (int part = 0; part < parts; part++) {
            known[part] = FMA(own, state[part], known[part]);
            found[part] = FMA(other, state[part], found[part]);
        }
    }
}

/* `read_some`, with a loop for one update; what is written is read the next time. */
INLINE void V(read_state)(struct V(columns) *columns, const int parts, long size, float *to, long stride,
                          const float *key, const float *query, FLOATS *known, FLOATS *found) {
    if (columns->count == 1)
        V(read_some)(columns, parts, 1, size, to, stride, key, query, known, found);
    else
        V(read_some)(columns, parts, columns->count, size, to, stride, key, query, known, found);
    if (!to) return;
    columns->from = to;
    columns->stride = stride;
    columns->count = 0;
}

/* The update of a kept row. */
INLINE void V(take_kept)(const struct pass *pass, const struct sequence *own, const int parts, long head,
                         long column, long row, struct V(update) *update) {
    const long place = head * own->room + row;
    update->key = own->keys + place * pass->key_size;
    update->decay = V(exponential)(ALL_FLOATS(own->decays[place]));
    for (int part = 0; part < parts; part++)
        update->values[part] = V(load)(own->values + place * pass->value_size + column + LANES * part);
}

/* The update and the output of a row of the pass, from the products of its key and query with the state. */
INLINE void V(apply_rule)(const struct pass *pass, const float *mixed, const int parts, long head, long column,
                          long row, const FLOATS *known, const FLOATS *found, struct V(update) *update) {
    const long number = row * pass->value_heads + head, keys = pass->key_heads * pass->key_size;
    const long key_head = head / (pass->value_heads / pass->key_heads);
    const float *values = mixed + 2 * keys + head * pass->value_size + column;
    float *out = pass->out + number * pass->value_size + column;
    const FLOATS weight = ALL_FLOATS(pass->weights[number]), overlap = ALL_FLOATS(mixed[all_columns(pass) + key_head]);
    update->key = mixed + keys + key_head * pass->key_size;
    update->decay = V(exponential)(ALL_FLOATS(pass->decays[number]));
    for (int part = 0; part < parts; part++) {
        update->values[part] = weight * (V(load)(values + LANES * part) - update->decay * known[part]);
        V(store)(out + LANES * part, FMA(overlap, update->values[part], update->decay * found[part]));
    }
}

/* The rule for some columns of the values of a head, from `column` on. */
INLINE void V(recur_columns)(const struct pass *pass, const struct sequence *own, const int parts, long head,
                             long column) {
    const long size = pass->key_size, stride = pass->value_size, place = head * size * stride + column;
    const long key_head = head / (pass->value_heads / pass->key_heads), end = own->kept + own->rows;
    const struct mark *mark = own->marks, *last_mark = mark + own->num_marks;
    float tile[KEYS * WIDE * WIDTH];
    FLOATS known[WIDE * PARTS], found[WIDE * PARTS];
    struct V(columns) columns;
    columns.from = own->state + place, columns.stride = stride, columns.count = 0;
    for (long row = 0; row < end; row++) {
        const int is_kept = row < own->kept, is_marked = mark < last_mark && mark->row == row;
        const float *mixed = is_kept ? NULL : mixed_row(pass, own->first + row - own->kept);
        const float *query = is_kept ? NULL : mixed + key_head * size;
        const float *key = is_kept ? NULL : query + pass->key_heads * size;
        float *to = is_marked ? (mark++)->state + place : row < end - 1 || mark < last_mark ? tile : NULL;
        if (is_marked || !is_kept || columns.count == PENDING)
            V(read_state)(&columns, parts, size, to, is_marked ? stride : WIDE * WIDTH, key, query, known, found);
        struct V(update) *update = columns.updates + columns.count++;
        if (is_kept)
            V(take_kept)(pass, own, parts, head, column, row, update);
        else
            V(apply_rule)(pass, mixed, parts, head, column, own->first + row - own->kept, known, found, update);
        if (row < own->begin) continue;
        const long number = head * (end - own->begin) + row - own->begin;
        for (int part = 0; part < parts; part++)
            V(store)(own->next_values + number * stride + column + LANES * part, update->values[part]);
    }
    if (mark < last_mark)
        V(read_state)(&columns, parts, size, mark->state + place, stride, NULL, NULL, known, found);
}

/* Keep the keys and decays of a value head. */
INLINE void V(keep_rows)(const struct pass *pass, const struct sequence *own, long head) {
    const long size = pass->key_size, end = own->kept + own->rows;
    const long at = (pass->key_heads + head / (pass->value_heads / pass->key_heads)) * size;
    for (long row = own->begin; row < end; row++) {
        const long number = head * (end - own->begin) + row - own->begin, place = head * own->room + row;
        const long other = own->first + row - own->kept;
        const float *key = row < own->kept ? own->keys + place * size : mixed_row(pass, other) + at;
        memcpy(own->next_keys + number * size, key, 4 * size);
        own->next_decays[number] = row < own->kept ? own->decays[place] : pass->decays[other * pass->value_heads + head];
    }
}

/* The value heads of a key head, for the rows of a sequence. */
WITHIN static void V(recur)(const struct pass *pass, const struct sequence *own, long key_head) {
    const long size = pass->key_size, keys = pass->key_heads * size, values = pass->value_size;
    const long each = pass->value_heads / pass->key_heads;
    V(convolve)(pass, own, key_head * size, size);
    V(convolve)(pass, own, keys + key_head * size, size);
    V(convolve)(pass, own, 2 * keys + key_head * each * values, each * values);
    for (long row = own->first; row < own->first + own->rows; row++) {
        float *query = mixed_row(pass, row) + key_head * size, *key = query + keys;
        V(normalise)(query, size, ALL_FLOATS(1) / SQRT(ALL_FLOATS(size)));
        V(normalise)(key, size, ALL_FLOATS(1));
        mixed_row(pass, row)[all_columns(pass) + key_head] = V(dot)(query, key, size);
    }
    for (long head = key_head * each; head < (key_head + 1) * each; head++) {
        long column = 0;
        for (; column + WIDE * WIDTH <= values; column += WIDE * WIDTH)
            V(recur_columns)(pass, own, WIDE * PARTS, head, column);
        if (column < values) V(recur_columns)(pass, own, PARTS, head, column);
        V(keep_rows)(pass, own, head);
    }
}
