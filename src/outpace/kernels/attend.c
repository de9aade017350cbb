/* Attention of rows over cached pages of keys and values.

   A row sees the slots from `low` to `stop`, and in a tree those past the root slot whose bit is set
   in its ancestor mask. Pages of 16 slots are processed in order with an online softmax (Milakov and
   Gimelshein, 2018) in float32. The order of a row's sums is fixed: its result depends neither on
   the batch nor on the number of threads, and all instruction sets give the same bits. */

#include <stdint.h>

#include "isa.h"

struct pass {
    int isa, half, cached; /* instruction set; queries and results are bfloat16; numbers of the cache */
    long heads, kv_heads, size;
    const char *q, *keys, *values;
    long q_row, q_head, slot, head; /* strides in numbers */
    const int64_t *pages;           /* page tables of all sequences; `tables` has each chunk's offset */
    const int64_t *tables, *chunks; /* first row of each chunk, then the end of all */
    long num_chunks;
    const int64_t *low, *stop;         /* of each row */
    const int64_t *trunk, *bits, *own; /* with trees: root slot, ancestor mask, own slot; else null */
    const float *sinks;                /* of each head, or null */
    char *out;
    float scale; /* of scores, in base-two logarithms */
    int threads;
};

#if X86 || ARM

#include "parallel.h"

/* Numbers of the cache; after the INT8 ones of a slot and head comes the float32 that they are times. */
enum cached { FLOAT32, BFLOAT16, FLOAT16, INT8 };

enum {
    PAGE = 16,
    HEADS = 8,   /* heads of a work item, */
    STATES = 96, /* and its rows of a sequence times these heads, which share a page while it is cached */
    SIZE = 256,  /* largest head */
};

/* Bytes of a number of the cache. */
static inline long cached_bytes(const struct pass *pass) {
    return pass->cached == FLOAT32 ? 4 : pass->cached == INT8 ? 1 : 2;
}

/* The bit of each slot of a page in a mask. */
static const int32_t BITS[PAGE] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                   1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};

/* Mask of the slots `first` to `first + PAGE` that a row sees. */
static inline unsigned seen(const struct pass *pass, long row, long first) {
    long begin = pass->low[row] - first, end = pass->stop[row] - first;
    unsigned below = end <= 0 ? 0 : end >= PAGE ? 0xffff : (1u << end) - 1;
    unsigned before = begin <= 0 ? 0 : begin >= PAGE ? 0xffff : (1u << begin) - 1;
    unsigned found = below & ~before;
    if (pass->bits) {
        uint64_t bits = (uint64_t)pass->bits[row];
        long by = first - pass->trunk[row];
        if (by >= 0 && by < 64) found |= (unsigned)(bits >> by) & 0xffff;
        if (by < 0 && by > -PAGE) found |= (unsigned)(bits << -by) & 0xffff;
        if (pass->own[row] >= first && pass->own[row] < first + PAGE)
            found |= 1u << (pass->own[row] - first);
    }
    return found;
}

/* Whether a row of a tree sees slots that are not side by side. */
static inline int is_branch(const struct pass *pass, long row) {
    return pass->bits && (pass->bits[row] || pass->own[row] > pass->stop[row]);
}

/* Request the keys or values of a page. Those of a text may lie anywhere, and a processor foresees only
   the bytes that follow: without it, attention over scattered pages took a fifth longer. */
static inline void prefetch_page(const struct pass *pass, const char *numbers, long at) {
    const long begin = at * cached_bytes(pass), length = PAGE * pass->slot * cached_bytes(pass);
    for (long line = begin; line < begin + length; line += 64) __builtin_prefetch(numbers + line);
}

#include "base.h"
#include "attend.h"
#include "end.h"

#if X86

#define ISA avx512
#define TARGET AVX512_TARGET
#include "zmm.h"
#include "attend.h"
#include "end.h"

#endif

typedef void attend(const struct pass *, const int64_t *, long first, long end, long from, long to, long kv_head);

static attend *find_loop(int isa) {
    switch (isa) {
#if X86
        case AVX512: return attend_avx512;
        default: return attend_avx2;
#else
        default: return attend_neon;
#endif
    }
}

/* A pass in work items: each is a chunk of rows with some heads of a key head. */
struct items {
    const struct pass *pass;
    attend *loop;
    long parts, each; /* work items per key head, and their heads */
};

static void attend_item(void *context, size_t number) {
    const struct items *items = context;
    const struct pass *pass = items->pass;
    const long item = number, shared = pass->heads / pass->kv_heads, parts = items->parts;
    const long chunk = item / (pass->kv_heads * parts), kv_head = item / parts % pass->kv_heads;
    const long from = kv_head * shared + item % parts * items->each, last = (kv_head + 1) * shared;
    const long to = from + items->each < last ? from + items->each : last;
    if (from < to)
        items->loop(pass, pass->pages + pass->tables[chunk], pass->chunks[chunk], pass->chunks[chunk + 1],
                    from, to, kv_head);
}

/* Attention of all rows of a pass. */
void outpace_attend(const struct pass *pass) {
    const long shared = pass->heads / pass->kv_heads, least = pass->num_chunks * pass->kv_heads;
    long parts = (shared + HEADS - 1) / HEADS;
    while (parts < shared && least * parts < pass->threads) parts++;
    struct items items = {pass, find_loop(pass->isa), parts, (shared + parts - 1) / parts};
    run_parallel(least * parts, pass->threads, &items, attend_item);
}

#else

void outpace_attend(const struct pass *pass) {}

#endif
