/* Calls on several threads: those of OpenMP, or of the system on macOS, whose compiler has no OpenMP.
   Elsewhere all calls are on one thread. */

#pragma once

#include <stddef.h>

#if !defined(_OPENMP) && defined(__APPLE__)
#include <dispatch/dispatch.h>
#endif

/* Call `task` with each number below `count`; OpenMP uses `threads` threads. */
static inline void run_parallel(long count, int threads, void *context, void (*task)(void *, size_t)) {
    if (threads > 1 && count > 1) {
#if defined(_OPENMP)
        if (count > threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
            for (long number = 0; number < count; number++) task(context, number);
        } else {
/* A thread gets the same number in each call: its share of a matrix may still be in its cache. */
#pragma omp parallel for schedule(static, 1) num_threads(threads)
            for (long number = 0; number < count; number++) task(context, number);
        }
        return;
#elif defined(__APPLE__)
        dispatch_apply_f(count, DISPATCH_APPLY_AUTO, context, task);
        return;
#endif
    }
    for (long number = 0; number < count; number++) task(context, number);
}
