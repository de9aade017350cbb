/* Gated delta layers in their recurrent form: the convolution and the rule, for the rows of all sequences.

   A sequence has a state, and rows after it that it keeps: their keys, corrected values and decays. They are
   added to the state while it is read, and it is written only where a later pass continues from it. Each row
   is computed from the state before it by the same operations, so its result depends neither on the batch,
   nor on the number of threads, nor on the rows that a pass has together, and all instruction sets give the
   same bits. gated_delta.py has the rule, and another form of it in PyTorch. */

#include <stdint.h>
#include <string.h>

#include "isa.h"

/* A state `[value_heads, key_size, value_size]` to write, before a row. Rows are numbered from a sequence's
   first kept one. */
struct mark {
    long row;
    float *state;
};

/* A sequence: its state, the rows kept so far, its rows of the pass, and what it has after them. */
struct sequence {
    const float *state, *inputs;         /* inputs of the convolution: taps - 1 rows, then the kept ones */
    const float *keys, *values, *decays; /* kept rows, [value_heads, room, ...]; logarithms of decays */
    long kept, room;
    long first, rows;         /* range in the pass */
    const struct mark *marks; /* states to write, by row */
    long num_marks;
    long begin; /* first row to keep after the pass */
    float *next_inputs, *next_keys, *next_values, *next_decays;
};

struct pass {
    int isa, threads;
    long key_heads, value_heads, key_size, value_size, taps;
    const float *inputs, *weight; /* of the convolution, [rows, `stride`] and [columns, taps] */
    long stride;
    const float *decays, *weights; /* of each row: logarithm of decay, weight of correction, [rows, value_heads] */
    float *mixed;                  /* scratch memory, [rows, columns + key_heads] */
    float *out;                    /* [rows, value_heads, value_size] */
    const struct sequence *sequences;
    long num_sequences;
};

#if X86 || ARM

#include "parallel.h"

enum {
    KEYS = 256, /* largest head of keys */
    TAPS = 8,
    WIDE = 2,    /* tiles of columns that are read together */
    PENDING = 8, /* rows that are added to the state at a time */
};

/* Columns of queries, keys and values. */
static inline long all_columns(const struct pass *pass) {
    return 2 * pass->key_heads * pass->key_size + pass->value_heads * pass->value_size;
}

/* Input of the convolution: row 0 is taps - 1 before the first kept row. */
static inline const float *find_input(const struct pass *pass, const struct sequence *own, long row) {
    const long before = pass->taps - 1 + own->kept;
    return row < before ? own->inputs + row * all_columns(pass)
                        : pass->inputs + (own->first + row - before) * pass->stride;
}

/* What the convolution gives for a row: queries, keys and values, then the product of each query with its key. */
static inline float *mixed_row(const struct pass *pass, long row) {
    return pass->mixed + row * (all_columns(pass) + pass->key_heads);
}

#include "base.h"
#include "gated_delta.h"
#include "end.h"

#if X86

#define ISA avx512
#define TARGET AVX512_TARGET
#include "zmm.h"
#include "gated_delta.h"
#include "end.h"

#endif

/* Run the value heads of a key head, for one sequence. */
static void recur_item(void *context, size_t number) {
    const struct pass *pass = context;
    const struct sequence *own = pass->sequences + number / pass->key_heads;
    const long key_head = number % pass->key_heads;
    switch (pass->isa) {
#if X86
        case AVX512: recur_avx512(pass, own, key_head); break;
        default: recur_avx2(pass, own, key_head);
#else
        default: recur_neon(pass, own, key_head);
#endif
    }
}

/* Run all rows of a pass, and write what its sequences keep. */
void outpace_recur(const struct pass *pass) {
    run_parallel(pass->num_sequences * pass->key_heads, pass->threads, (void *)pass, recur_item);
}

#else

void outpace_recur(const struct pass *pass) {}

#endif
