/* Calls on several threads. */

#pragma once

#include <stddef.h>

/* Shares of a matrix per thread: a thread that has finished can take another one's. */
enum { SHARES = 8 };

/* Call `task` with each number below `count`, on at most `threads` threads.

   A thread has the same contiguous range of numbers in each call with the same arguments: its share of a
   matrix may still be in its cache. Threads that have finished continue with the ranges of others. */
void run_parallel(long count, int threads, void *context, void (*task)(void *, size_t));
