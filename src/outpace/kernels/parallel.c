/* OpenMP's threads, which PyTorch's operators use as well, or a pool that does not wait for late threads.

   OpenMP is the library that PyTorch loaded, by its two functions: this file needs no compiler with OpenMP,
   and never loads a second library, whose threads would compete with those of the first.

   OpenMP joins all threads at the end of a call. If another program has the processor of one, each of the
   hundreds of calls in a pass waits for milliseconds until that thread runs again. For the pool, a call is
   over when all numbers are finished: a thread that did not run in the meantime has missed it. But while
   PyTorch's threads look out for work, for milliseconds after each operator, those of the pool share
   processors with them. So the pool runs calls for a while after a thread of OpenMP was late, and all of them
   where there is no OpenMP. Meanwhile PyTorch's operators run on the caller's thread alone, in passes that
   spare OpenMP. */

#include "parallel.h"
#include "isa.h"

#if X86 || ARM

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

enum {
    MOST = 256,  /* threads */
    LINE = 64,   /* bytes of a cache line */
    PAUSES = 64, /* between two looks at the clock, or two offers of the processor */
};

/* Times in nanoseconds. */
enum {
    PATIENCE = 200000,   /* for which a thread of the pool looks out for the next call before it sleeps */
    LATE = 1000000,      /* that OpenMP's threads may take longer than the caller: waking up takes less */
    DETOUR = 1000000000, /* for which the pool runs calls after that */
};

/* A thread's range of numbers. */
struct range {
    _Alignas(LINE) atomic_long next;
    long end;
};

/* The call, written by the caller while `state` admits nobody. */
static struct {
    void (*task)(void *, size_t);
    void *context;
    struct range ranges[MOST];
} call;

/* From the highest bits: the number of the call (32), its threads, 0 if it admits nobody (16), and the
   threads of the pool that are inside (16). */
static _Alignas(LINE) _Atomic uint64_t state;

static inline uint32_t number_of(uint64_t state) { return state >> 32; }
static inline int threads_of(uint64_t state) { return state >> 16 & 0xffff; }
static inline int inside_of(uint64_t state) { return state & 0xffff; }

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* held during a call */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t awake = PTHREAD_COND_INITIALIZER;
static atomic_int sleepers;
static int started = 1; /* threads, with the caller's */

static inline void pause_thread(void) {
#if X86
    __builtin_ia32_pause();
#else
    __asm__ volatile("isb");
#endif
}

static int64_t read_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void run_ranges(int own, int threads) {
    for (int other = own; other < own + threads; other++) {
        struct range *range = call.ranges + other % threads;
        /* A look first: `next` of a finished range stays in the caches of all threads. */
        while (atomic_load_explicit(&range->next, memory_order_relaxed) < range->end) {
            const long number = atomic_fetch_add_explicit(&range->next, 1, memory_order_relaxed);
            if (number < range->end) call.task(call.context, number);
        }
    }
}

/* Whether a thread may enter a call that it has not entered before. */
static int admits(uint64_t seen, int own, uint32_t last) { return threads_of(seen) > own && number_of(seen) != last; }

/* Return a state that admits a thread. */
static uint64_t wait_for_call(int own, uint32_t last) {
    for (int64_t since = read_clock(); read_clock() - since < PATIENCE;)
        for (int time = 0; time < PAUSES; time++) {
            const uint64_t seen = atomic_load(&state);
            if (admits(seen, own, last)) return seen;
            pause_thread();
        }
    uint64_t seen;
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&sleepers, 1);
    while (seen = atomic_load(&state), !admits(seen, own, last)) pthread_cond_wait(&awake, &sleep_lock);
    atomic_fetch_sub(&sleepers, 1);
    pthread_mutex_unlock(&sleep_lock);
    return seen;
}

static void *serve_calls(void *number) {
    const int own = (intptr_t)number;
    for (uint32_t last = 0;;) {
        uint64_t seen = wait_for_call(own, last);
        if (!atomic_compare_exchange_strong(&state, &seen, seen + 1)) continue;
        last = number_of(seen);
        run_ranges(own, threads_of(seen));
        atomic_fetch_sub(&state, 1);
    }
    return NULL;
}

/* The child of a fork has none of the threads. */
static void forget_threads(void) {
    pthread_mutex_init(&caller, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&awake, NULL);
    atomic_store(&state, 0);
    atomic_store(&sleepers, 0);
    started = 1;
}

static void forget_threads_after_fork(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* Start threads until there are `threads`, or no more can be had. */
static void start_threads(int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, forget_threads_after_fork);
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; started < threads; started++) {
        if (pthread_create(&thread, NULL, serve_calls, (void *)(intptr_t)started)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Let threads in, run with them, and return when the last one has left. */
static void run_with_pool(int threads) {
    uint64_t seen = atomic_load(&state);
    /* No call has number 0, which threads begin with. */
    const uint64_t number = number_of(seen) == UINT32_MAX ? 1 : number_of(seen) + 1;
    atomic_store(&state, number << 32 | (uint64_t)threads << 16);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&awake);
        pthread_mutex_unlock(&sleep_lock);
    }
    run_ranges(0, threads);
    for (int time = 1;; time++) {
        seen = atomic_load(&state);
        if (!inside_of(seen) && atomic_compare_exchange_strong(&state, &seen, number << 32)) return;
        if (time % PAUSES)
            pause_thread();
        else
            sched_yield(); /* the thread inside may need this processor */
    }
}

/* OpenMP of GCC; LLVM's and Intel's libraries have the same functions. NULL where none is loaded. */
__attribute__((weak)) void GOMP_parallel(void (*run)(void *), void *context, unsigned threads, unsigned flags);
__attribute__((weak)) int omp_get_thread_num(void);
__attribute__((weak)) void omp_set_num_threads(int threads);

/* The share of one of OpenMP's threads, and the caller's time at its end. */
struct share {
    int threads;
    int64_t finished;
};

static void run_share(void *context) {
    struct share *share = context;
    const int own = omp_get_thread_num();
    run_ranges(own, share->threads);
    if (!own) share->finished = read_clock();
}

/* Run with OpenMP's threads; return whether one of them was late. */
static int run_with_openmp(int threads) {
    const int64_t begin = read_clock();
    struct share share = {threads, begin};
    GOMP_parallel(run_share, &share, threads, 0);
    return read_clock() - share.finished > LATE + share.finished - begin;
}

static _Atomic int64_t detour_end;
static _Thread_local int spared; /* threads of OpenMP before the caller's pass, if that spares them; or 0 */

/* Run a call, which holds the mutex `caller`. */
static void run_call(int threads) {
    if (GOMP_parallel && read_clock() >= detour_end) {
        if (run_with_openmp(threads)) {
            detour_end = read_clock() + DETOUR;
            if (spared) omp_set_num_threads(1);
        }
        return;
    }
    if (started < threads) start_threads(threads);
    run_with_pool(threads);
}

/* Begin a pass of this thread, which has `threads` of OpenMP and spares them while they are late; 0 ends it. */
void outpace_spare_openmp(int threads) {
    if (!omp_set_num_threads) return;
    if (!threads)
        omp_set_num_threads(spared);
    else if (read_clock() < detour_end)
        omp_set_num_threads(1);
    spared = threads;
}

void run_parallel(long count, int threads, void *context, void (*task)(void *, size_t)) {
    if (threads > count) threads = count;
    if (threads > MOST) threads = MOST;
    if (threads < 2 || pthread_mutex_trylock(&caller)) { /* the pool is for one call at a time */
        for (long number = 0; number < count; number++) task(context, number);
        return;
    }
    call.task = task;
    call.context = context;
    for (int own = 0; own < threads; own++) {
        atomic_store_explicit(&call.ranges[own].next, count * own / threads, memory_order_relaxed);
        call.ranges[own].end = count * (own + 1) / threads;
    }
    run_call(threads);
    pthread_mutex_unlock(&caller);
}

#else

void outpace_spare_openmp(int threads) {}

#endif
