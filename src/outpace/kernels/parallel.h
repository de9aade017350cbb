/* Calls on several threads: those of OpenMP, or of the system on macOS, whose compiler has no OpenMP.
   Elsewhere all calls are on one thread. */

#pragma once

#include <stddef.h>

#if !defined(_OPENMP) && defined(__APPLE__)
#include <dispatch/dispatch.h>
#endif

/* Call `task` with each number below `count`, on at most `threads` threads if these are OpenMP's. */
static inline void run_parallel(long count, int threads, void *context, void (*task)(void *, size_t)) {
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic) num_threads(threads < count ? threads : (int)count) if (threads > 1 && count > 1)
    for (long number = 0; number < count; number++) task(context, number);
#else
#if defined(__APPLE__)
    if (threads > 1 && count > 1) {
        dispatch_apply_f(count, DISPATCH_APPLY_AUTO, context, task);
        return;
    }
#endif
    for (long number = 0; number < count; number++) task(context, number);
#endif
}
