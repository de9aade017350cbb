/* Calls of run_parallel from two threads and from children; exits with 1 if a number is not called once. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parallel.h"

enum { NUMBERS = 1000, CALLS = 2000, THREADS = 5 };

struct counts {
    atomic_int of[NUMBERS];
};

static void count_number(void *context, size_t number) {
    atomic_fetch_add(&((struct counts *)context)->of[number], 1);
}

static void *make_calls(void *seed) {
    static const int sizes[] = {0, 1, 2, 3, 7, 64, NUMBERS};
    struct counts counts;
    for (long call = (long)seed; call < (long)seed + CALLS; call++) {
        const int size = sizes[call % 7], threads = 1 + call % THREADS;
        for (int number = 0; number < NUMBERS; number++) atomic_init(&counts.of[number], 0);
        run_parallel(size, threads, &counts, count_number);
        for (int number = 0; number < NUMBERS; number++)
            if (atomic_load(&counts.of[number]) != (number < size)) {
                fprintf(stderr, "call %ld of %d: number %d was called %d times\n", call, size, number,
                        atomic_load(&counts.of[number]));
                exit(1);
            }
    }
    return NULL;
}

int main(void) {
    pthread_t other;
    pthread_create(&other, NULL, make_calls, (void *)3);
    make_calls((void *)0);
    pthread_join(other, NULL);
    const pid_t child = fork(); /* it has none of the threads */
    if (!child) {
        make_calls((void *)1);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    make_calls((void *)2);
    return status != 0;
}
