/* pthread_mutex_*, the replaced kinds: return codes, static initialisers, timeouts. */
#include "check.h"

enum { THREADS = 4, ROUNDS = 50000 };

static long counter;

static void *count(void *argument)
{
    pthread_mutex_t *mutex = argument;
    for (int i = 0; i < ROUNDS; i++) {
        EQUAL(pthread_mutex_lock(mutex), 0);
        counter++;
        EQUAL(pthread_mutex_unlock(mutex), 0);
    }
    return NULL;
}

static void excludes(pthread_mutex_t *mutex)
{
    pthread_t threads[THREADS];
    counter = 0;
    for (int i = 0; i < THREADS; i++)
        threads[i] = start(count, mutex);
    for (int i = 0; i < THREADS; i++)
        end(threads[i]);
    EQUAL(counter, (long)THREADS * ROUNDS);
}

static int timed(pthread_mutex_t *mutex)
{
    struct timespec at = in_ms(CLOCK_REALTIME, 20);
    int result = pthread_mutex_timedlock(mutex, &at);
    EQUAL(result != ETIMEDOUT || is_past(CLOCK_REALTIME, at), 1);
    return result;
}

static int clocked(pthread_mutex_t *mutex)
{
    struct timespec at = in_ms(CLOCK_MONOTONIC, 20);
    int result = pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &at);
    EQUAL(result != ETIMEDOUT || is_past(CLOCK_MONOTONIC, at), 1);
    return result;
}

static int badly_timed(pthread_mutex_t *mutex)
{
    struct timespec at = in_ms(CLOCK_REALTIME, 0);
    at.tv_nsec = 1000000000;
    return pthread_mutex_timedlock(mutex, &at);
}

static int timed_before_1970(pthread_mutex_t *mutex)
{
    struct timespec at = {-1, 0};
    return pthread_mutex_timedlock(mutex, &at);
}

static int timed_for_ever(pthread_mutex_t *mutex)
{
    struct timespec at = {INT64_MAX, 999999999};
    return pthread_mutex_timedlock(mutex, &at);
}

static int by_another_clock(pthread_mutex_t *mutex)
{
    struct timespec at = in_ms(CLOCK_REALTIME, 0);
    return pthread_mutex_clocklock(mutex, CLOCK_PROCESS_CPUTIME_ID, &at);
}

/* The same for all kinds: while another thread holds it, and when none does. */
static void common(pthread_mutex_t *mutex)
{
    EQUAL(pthread_mutex_unlock(mutex), EPERM);
    EQUAL(pthread_mutex_lock(mutex), 0);
    EQUAL(ELSEWHERE(pthread_mutex_trylock, mutex), EBUSY);
    EQUAL(ELSEWHERE(timed, mutex), ETIMEDOUT);
    EQUAL(ELSEWHERE(clocked, mutex), ETIMEDOUT);
    EQUAL(ELSEWHERE(timed_before_1970, mutex), ETIMEDOUT);
    EQUAL(ELSEWHERE(badly_timed, mutex), EINVAL);
    EQUAL(ELSEWHERE(by_another_clock, mutex), EINVAL);
    EQUAL(pthread_mutex_destroy(mutex), EBUSY);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(timed(mutex), 0);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(clocked(mutex), 0);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(timed_for_ever(mutex), 0);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_trylock(mutex), 0);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_unlock(mutex), EPERM);
    excludes(mutex);
}

static void plain(pthread_mutex_t *mutex)
{
    common(mutex);
    EQUAL(pthread_mutex_lock(mutex), 0);
    EQUAL(pthread_mutex_trylock(mutex), EBUSY);
    EQUAL(timed(mutex), ETIMEDOUT);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_destroy(mutex), 0);
    EQUAL(pthread_mutex_lock(mutex), EINVAL);
}

static void recursive(pthread_mutex_t *mutex)
{
    common(mutex);
    EQUAL(pthread_mutex_lock(mutex), 0);
    EQUAL(pthread_mutex_lock(mutex), 0);
    EQUAL(pthread_mutex_trylock(mutex), 0);
    EQUAL(timed(mutex), 0);
    EQUAL(ELSEWHERE(pthread_mutex_unlock, mutex), EPERM);
    for (int i = 0; i < 3; i++)
        EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(ELSEWHERE(pthread_mutex_trylock, mutex), EBUSY);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_unlock(mutex), EPERM);
    EQUAL(pthread_mutex_lock(mutex), 0);
    ((unsigned *)mutex)[1] = UINT32_MAX; /* as if it had been locked that often */
    EQUAL(pthread_mutex_lock(mutex), EAGAIN);
    EQUAL(pthread_mutex_trylock(mutex), EAGAIN);
    ((unsigned *)mutex)[1] = 1;
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_destroy(mutex), 0);
}

static void checked(pthread_mutex_t *mutex)
{
    common(mutex);
    EQUAL(pthread_mutex_lock(mutex), 0);
    EQUAL(pthread_mutex_lock(mutex), EDEADLK);
    EQUAL(timed(mutex), EDEADLK);
    EQUAL(pthread_mutex_trylock(mutex), EBUSY);
    EQUAL(ELSEWHERE(pthread_mutex_unlock, mutex), EPERM);
    EQUAL(pthread_mutex_unlock(mutex), 0);
    EQUAL(pthread_mutex_destroy(mutex), 0);
}

int main(void)
{
    static pthread_mutex_t normal_ = PTHREAD_MUTEX_INITIALIZER;
    static pthread_mutex_t recursive_ = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    static pthread_mutex_t checked_ = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
    static pthread_mutex_t adaptive_ = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
    pthread_mutex_t mutex;
    begin();
    plain(&normal_);
    recursive(&recursive_);
    checked(&checked_);
    plain(&adaptive_);
    memset(&mutex, 0xa5, sizeof mutex);
    EQUAL(pthread_mutex_init(&mutex, NULL), 0);
    plain(&mutex);
    mutex = made(PTHREAD_MUTEX_NORMAL);
    plain(&mutex);
    mutex = made(PTHREAD_MUTEX_ADAPTIVE_NP);
    plain(&mutex);
    mutex = made(PTHREAD_MUTEX_RECURSIVE);
    recursive(&mutex);
    mutex = made(PTHREAD_MUTEX_ERRORCHECK);
    checked(&mutex);
    return 0;
}
