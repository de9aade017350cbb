/* Attention of rows over cached pages of keys and values, for x86 processors with AVX512.

   A row sees the slots from `low` to `stop`, and in a tree those past the root slot whose bit is set
   in its ancestor mask. Pages of 16 slots are processed in order with an online softmax (Milakov and
   Gimelshein, 2018) in float32. The order of a row's sums is fixed, so its result depends neither on
   the batch nor on the number of threads. */

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <omp.h>

#include "half.h"

#define WITHIN __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define INLINE WITHIN static inline __attribute__((always_inline))

enum {
    PAGE = 16,
    LANES = 16,
    ROWS = 16,  /* rows of a sequence that share a page while it is cached, */
    HEADS = 8,  /* and their heads */
    SIZE = 256, /* largest head */
};

struct pass {
    int half; /* numbers are bfloat16 */
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

/* Running state of a row and head: largest score, weights by lane, weighted sums of values; and the
   query, times the scale of scores. */
struct state {
    float top;
    __m512 weights;
    __m512 row[SIZE / LANES], sums[SIZE / LANES];
};

INLINE __m512 load(const struct pass *pass, const char *at, long index) {
    if (!pass->half) return _mm512_loadu_ps((const float *)at + index);
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)at + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Two to the power of numbers of at most 0: a polynomial of the fractional part. */
INLINE __m512 power(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200), x); /* NaN stays NaN */
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530393381609e-4f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.3333558146428443e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6181291076284772e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5504108664821580e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022650695910072e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718055994531e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1));
    return _mm512_scalef_ps(y, whole);
}

/* The sums of 16 vectors, one per lane. */
INLINE __m512 added(__m512 *each) {
    __m512 four[4];
    for (int n = 0; n < 4; n++) {
        __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(each[4 * n], each[4 * n + 1]),
                                 _mm512_unpackhi_ps(each[4 * n], each[4 * n + 1]));
        __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(each[4 * n + 2], each[4 * n + 3]),
                                 _mm512_unpackhi_ps(each[4 * n + 2], each[4 * n + 3]));
        four[n] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    /* Each 128-bit lane has partial sums of four vectors. */
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                             _mm512_shuffle_f32x4(four[0], four[1], 0xee));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x44),
                             _mm512_shuffle_f32x4(four[2], four[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Mask of the slots `first` to `first + PAGE` that a row sees. */
static inline __mmask16 seen(const struct pass *pass, long row, long first) {
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
    return (__mmask16)found;
}

/* Accumulate the visible slots of a page for a row and head. */
INLINE void look(const struct pass *pass, struct state *state, const char *keys, const char *values,
                 __mmask16 mask) {
    const long chunks = pass->size / LANES;
    __m512 each[PAGE];
    for (long slot = 0; slot < PAGE; slot++) {
        const long at = slot * pass->slot;
        __m512 sum = _mm512_mul_ps(state->row[0], load(pass, keys, at));
        for (long chunk = 1; chunk < chunks; chunk++)
            sum = _mm512_fmadd_ps(state->row[chunk], load(pass, keys, at + LANES * chunk), sum);
        each[slot] = sum;
    }
    const __m512 scores = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), mask, added(each));
    const float most = _mm512_reduce_max_ps(scores);
    if (!(most <= state->top)) {
        const __m512 fade = power(_mm512_set1_ps(state->top - most));
        state->weights = _mm512_mul_ps(state->weights, fade);
        for (long chunk = 0; chunk < chunks; chunk++)
            state->sums[chunk] = _mm512_mul_ps(state->sums[chunk], fade);
        state->top = most;
    }
    const __m512 weights =
        _mm512_maskz_mov_ps(mask, power(_mm512_sub_ps(scores, _mm512_set1_ps(state->top))));
    float own[PAGE];
    _mm512_storeu_ps(own, weights);
    state->weights = _mm512_add_ps(state->weights, weights);
    for (long chunk = 0; chunk < chunks; chunk++) {
        __m512 sum = state->sums[chunk];
        if (mask == 0xffff)
            for (long slot = 0; slot < PAGE; slot++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(own[slot]),
                                      load(pass, values, slot * pass->slot + LANES * chunk), sum);
        else /* values outside the mask may be NaN */
            for (unsigned left = mask; left; left &= left - 1) {
                const long slot = __builtin_ctz(left);
                sum = _mm512_fmadd_ps(_mm512_set1_ps(own[slot]),
                                      load(pass, values, slot * pass->slot + LANES * chunk), sum);
            }
        state->sums[chunk] = sum;
    }
}

/* Attention of rows `first` to `end` of one sequence, for heads `from` to `to` of one key head. */
INLINE void attend_some(const struct pass *pass, const int64_t *pages, long first, long end,
                        long from, long to, long kv_head) {
    const long bytes = pass->half ? 2 : 4, chunks = pass->size / LANES, heads = to - from;
    const __m512 scale = _mm512_set1_ps(pass->scale);
    struct state states[ROWS * HEADS];
    long low = INT64_MAX, stop = 0;
    for (long row = first; row < end; row++) {
        if (pass->low[row] < low) low = pass->low[row];
        if (pass->stop[row] > stop) stop = pass->stop[row];
        if (pass->bits && pass->own[row] >= stop) stop = pass->own[row] + 1;
        for (long head = from; head < to; head++) {
            struct state *state = &states[(row - first) * heads + head - from];
            const char *q = pass->q + (row * pass->q_row + head * pass->q_head) * bytes;
            for (long chunk = 0; chunk < chunks; chunk++) {
                state->row[chunk] = _mm512_mul_ps(load(pass, q, LANES * chunk), scale);
                state->sums[chunk] = _mm512_setzero_ps();
            }
            state->top = pass->sinks ? pass->sinks[head] * 1.4426950408889634f : -__builtin_inff();
            state->weights = _mm512_maskz_mov_ps(pass->sinks ? 1 : 0, _mm512_set1_ps(1));
        }
    }
    for (long page = low / PAGE; page * PAGE < stop; page++) {
        const long at = (pages[page] * PAGE * pass->slot + kv_head * pass->head) * bytes;
        for (long row = first; row < end; row++) {
            const __mmask16 mask = seen(pass, row, page * PAGE);
            for (long head = 0; mask && head < heads; head++)
                look(pass, &states[(row - first) * heads + head], pass->keys + at,
                     pass->values + at, mask);
        }
    }
    for (long row = first; row < end; row++)
        for (long head = from; head < to; head++) {
            const struct state *state = &states[(row - first) * heads + head - from];
            const __m512 all = _mm512_set1_ps(_mm512_reduce_add_ps(state->weights));
            const long place = (row * pass->heads + head) * pass->size;
            for (long chunk = 0; chunk < chunks; chunk++) {
                const __m512 found = _mm512_div_ps(state->sums[chunk], all);
                char *out = pass->out + (place + LANES * chunk) * bytes;
                if (pass->half)
                    _mm256_storeu_si256((__m256i *)out, halved(found));
                else
                    _mm512_storeu_ps(out, found);
            }
        }
}

WITHIN static void attend_floats(const struct pass *pass, const int64_t *pages, long first, long end,
                                 long from, long to, long kv_head) {
    struct pass own = *pass;
    own.half = 0;
    attend_some(&own, pages, first, end, from, to, kv_head);
}

WITHIN static void attend_halves(const struct pass *pass, const int64_t *pages, long first, long end,
                                 long from, long to, long kv_head) {
    struct pass own = *pass;
    own.half = 1;
    attend_some(&own, pages, first, end, from, to, kv_head);
}

/* Whether this processor has the instructions for attention. */
int outpace_can_attend(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* Attention of all rows of a pass; a work item is a chunk of rows with some heads of a key head. */
void outpace_attend(const struct pass *pass) {
    const long shared = pass->heads / pass->kv_heads, least = pass->num_chunks * pass->kv_heads;
    long parts = (shared + HEADS - 1) / HEADS;
    while (parts < shared && least * parts < pass->threads) parts++;
    const long each = (shared + parts - 1) / parts, pieces = least * parts;
#pragma omp parallel for schedule(dynamic) num_threads(pass->threads)
    for (long piece = 0; piece < pieces; piece++) {
        const long chunk = piece / (pass->kv_heads * parts), kv_head = piece / parts % pass->kv_heads;
        const long from = kv_head * shared + piece % parts * each, last = (kv_head + 1) * shared;
        const long to = from + each < last ? from + each : last;
        if (from >= to) continue;
        (pass->half ? attend_halves : attend_floats)(
            pass, pass->pages + pass->tables[chunk], pass->chunks[chunk], pass->chunks[chunk + 1],
            from, to, kv_head);
    }
}

#else

struct pass;

int outpace_can_attend(void) { return 0; }

void outpace_attend(const struct pass *pass) {}

#endif
