/*
 * Four threads count with each kind of lock; then a timed lock reaches its deadline. C11 and later, C++11 and later:
 *
 *     cc -I crates/locks/qspinlock_capi/include crates/locks/qspinlock_capi/examples/counter.c \
 *        -L target/release -lqspin -Wl,-rpath,$PWD/target/release -lpthread -o counter
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qspinlock.h"

#define THREADS 4
#define ROUNDS 20000
#define MILLISECOND_NS 1000000u

/* Zeroed memory is a free lock, so the initialisers are zeroes. */
static qspin_fair_t fair = QSPIN_FAIR_INIT;
static qspin_hybrid_t hybrid = QSPIN_HYBRID_INIT;
static qspin_native_t native = QSPIN_NATIVE_INIT;

static qspin_rwlock_t shared = QSPIN_RWLOCK_INIT;

static uint64_t counted[5];

static void check(int error, const char *what)
{
    if (error != 0) {
        fprintf(stderr, "%s: %s\n", what, strerror(error));
        exit(1);
    }
}

static void *count(void *unused)
{
    int round;

    for (round = 0; round < ROUNDS; round++) {
        check(qspin_fair_lock(&fair), "fair_lock");
        counted[0]++;
        check(qspin_fair_unlock(&fair), "fair_unlock");

        check(qspin_hybrid_timedlock(&hybrid, UINT64_MAX), "hybrid_timedlock"); /* a time that never comes */
        counted[1]++;
        check(qspin_hybrid_unlock(&hybrid), "hybrid_unlock");

        if (qspin_native_trylock(&native) == 0) { /* spins only: more threads than cores would wait for long */
            counted[2]++;
            check(qspin_native_unlock(&native), "native_unlock");
        }

        check(qspin_rwlock_rdlock(&shared), "rwlock_rdlock"); /* writers keep both counts equal */
        check(counted[3] == counted[4] ? 0 : EINVAL, "counts");
        check(qspin_rwlock_rdunlock(&shared), "rwlock_rdunlock");
        check(qspin_rwlock_wrlock(&shared), "rwlock_wrlock");
        counted[3]++;
        counted[4]++;
        check(qspin_rwlock_wrunlock(&shared), "rwlock_wrunlock");
    }
    return unused;
}

/* Waits for a lock that another thread holds, and gives up after 10 ms. Other waiters keep their order. */
static void *give_up(void *result)
{
    *(int *)result = qspin_fair_timedlock(&fair, qspin_deadline_in(10 * MILLISECOND_NS));
    return result;
}

int main(void)
{
    pthread_t threads[THREADS];
    int thread, result = 0;

    for (thread = 0; thread < THREADS; thread++)
        check(pthread_create(&threads[thread], NULL, count, NULL), "pthread_create");
    for (thread = 0; thread < THREADS; thread++)
        check(pthread_join(threads[thread], NULL), "pthread_join");
    if (counted[0] != THREADS * ROUNDS || counted[1] != THREADS * ROUNDS || counted[2] == 0 || counted[4] != THREADS * ROUNDS)
        return 1;
    printf("fair %llu, hybrid %llu\n", (unsigned long long)counted[0], (unsigned long long)counted[1]);

    check(qspin_fair_lock(&fair), "fair_lock");
    check(pthread_create(&threads[0], NULL, give_up, &result), "pthread_create");
    check(pthread_join(threads[0], NULL), "pthread_join");
    if (result != ETIMEDOUT || qspin_fair_destroy(&fair) != EBUSY)
        return 1;
    check(qspin_fair_unlock(&fair), "fair_unlock");
    check(qspin_fair_destroy(&fair), "fair_destroy");
    printf("gave up after 10 ms\n");
    return 0;
}
