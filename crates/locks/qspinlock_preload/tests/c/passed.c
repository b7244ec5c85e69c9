/* Mutexes and condition variables that are passed on to the C library, and work as they do there. */
#include "check.h"

static pthread_mutex_t with(int (*set)(pthread_mutexattr_t *, int), int value)
{
    pthread_mutex_t mutex;
    pthread_mutexattr_t attr;
    EQUAL(pthread_mutexattr_init(&attr), 0);
    EQUAL(set(&attr, value), 0);
    EQUAL(pthread_mutex_init(&mutex, &attr), 0);
    return mutex;
}

static void dies_with_it(pthread_mutex_t *robust)
{
    EQUAL(ELSEWHERE(pthread_mutex_lock, robust), 0);
    EQUAL(pthread_mutex_lock(robust), EOWNERDEAD);
    EQUAL(pthread_mutex_consistent(robust), 0);
    EQUAL(pthread_mutex_unlock(robust), 0);
}

static void works(pthread_mutex_t *mutex)
{
    struct timespec at = in_ms(CLOCK_REALTIME, 10);
    EQUAL(pthread_mutex_lock(mutex), 0);
    EQUAL(ELSEWHERE(pthread_mutex_trylock, mutex), EBUSY);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_timedlock(mutex, &at), 0);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_trylock(mutex), 0);
    EQUAL(pthread_mutex_unlock(mutex), 0);
}

/* A replaced condition variable with a mutex that is not replaced. */
static pthread_cond_t plain_cond = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t *its_mutex;
static int ready;

static void *make_ready(void *unused)
{
    EQUAL(pthread_mutex_lock(its_mutex), 0);
    ready = 1;
    EQUAL(pthread_cond_signal(&plain_cond), 0);
    EQUAL(pthread_mutex_unlock(its_mutex), 0);
    return unused;
}

static void waits_with(pthread_mutex_t *mutex)
{
    struct timespec past = in_ms(CLOCK_REALTIME, -10);
    its_mutex = mutex;
    ready = 0;
    EQUAL(pthread_mutex_lock(mutex), 0);
    pthread_t thread = start(make_ready, NULL);
    while (!ready)
        EQUAL(pthread_cond_wait(&plain_cond, mutex), 0);
    end(thread);
    EQUAL(pthread_cond_timedwait(&plain_cond, mutex, &past), ETIMEDOUT);
    EQUAL(pthread_mutex_unlock(mutex), 0);
}

struct shared {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    int turn;
};

static void take_turns(struct shared *shared, int mine)
{
    for (int i = 0; i < 1000; i++) {
        EQUAL(pthread_mutex_lock(&shared->mutex), 0);
        while (shared->turn != mine)
            EQUAL(pthread_cond_wait(&shared->cond, &shared->mutex), 0);
        shared->turn = !mine;
        EQUAL(i % 2 ? pthread_cond_signal(&shared->cond) : pthread_cond_broadcast(&shared->cond), 0);
        EQUAL(pthread_mutex_unlock(&shared->mutex), 0);
    }
}

static void between_processes(void)
{
    struct shared *shared = shared_memory(sizeof *shared);
    pthread_mutex_t own = PTHREAD_MUTEX_INITIALIZER;
    pthread_condattr_t attr;
    shared->mutex = with(pthread_mutexattr_setpshared, PTHREAD_PROCESS_SHARED);
    EQUAL(pthread_condattr_init(&attr), 0);
    EQUAL(pthread_condattr_setpshared(&attr, PTHREAD_PROCESS_SHARED), 0);
    EQUAL(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC), 0);
    EQUAL(pthread_cond_init(&shared->cond, &attr), 0);
    pid_t child = forked();
    take_turns(shared, child == 0);
    if (child == 0)
        _exit(0);
    EQUAL(exit_of(child), 0);
    EQUAL(pthread_mutex_lock(&shared->mutex), 0);
    struct timespec at = in_ms(CLOCK_MONOTONIC, 20);
    EQUAL(pthread_cond_timedwait(&shared->cond, &shared->mutex, &at), ETIMEDOUT);
    TRUE(is_past(CLOCK_MONOTONIC, at));
    EQUAL(pthread_cond_clockwait(&shared->cond, &shared->mutex, CLOCK_MONOTONIC, &at), ETIMEDOUT);
    EQUAL(pthread_mutex_unlock(&shared->mutex), 0);
    EQUAL(pthread_mutex_lock(&own), 0);
    EQUAL(pthread_cond_wait(&shared->cond, &own), EINVAL);
    EQUAL(pthread_cond_timedwait(&shared->cond, &own, &at), EINVAL);
    EQUAL(pthread_mutex_unlock(&own), 0);
    EQUAL(pthread_cond_destroy(&shared->cond), 0);
    EQUAL(pthread_mutex_destroy(&shared->mutex), 0);
}

int main(void)
{
    begin();
    pthread_mutex_t robust = with(pthread_mutexattr_setrobust, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_t inheriting = with(pthread_mutexattr_setprotocol, PTHREAD_PRIO_INHERIT);
    pthread_mutex_t shared = with(pthread_mutexattr_setpshared, PTHREAD_PROCESS_SHARED);
    works(&robust);
    works(&inheriting);
    works(&shared);
    dies_with_it(&robust);
    waits_with(&robust);
    waits_with(&inheriting);
    waits_with(&shared);
    EQUAL(pthread_mutex_destroy(&robust), 0);
    EQUAL(pthread_mutex_destroy(&inheriting), 0);
    EQUAL(pthread_mutex_destroy(&shared), 0);
    between_processes();
    return 0;
}
