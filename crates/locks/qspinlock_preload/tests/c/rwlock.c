/* pthread_rwlock_*: readers together, writers alone, return codes, kinds, timeouts. */
#include "check.h"

#include <sys/syscall.h>

enum { THREADS = 4, ROUNDS = 20000 };
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static long both[2];

static void *read_and_write(void *unused)
{
    for (int i = 0; i < ROUNDS; i++) {
        if (i % 4 == 0) {
            EQUAL(pthread_rwlock_wrlock(&lock), 0);
            both[0]++;
            both[1]++;
        } else {
            EQUAL(pthread_rwlock_rdlock(&lock), 0);
            EQUAL(both[0], both[1]);
        }
        EQUAL(pthread_rwlock_unlock(&lock), 0);
    }
    return unused;
}

static void writers_exclude(void)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        threads[i] = start(read_and_write, NULL);
    for (int i = 0; i < THREADS; i++)
        end(threads[i]);
    EQUAL(both[0], (long)THREADS * ROUNDS / 4);
}

/* Both must be inside at the same time to continue. */
static pthread_barrier_t inside;

static void *meet_inside(void *unused)
{
    EQUAL(pthread_rwlock_rdlock(&lock), 0);
    pthread_barrier_wait(&inside);
    EQUAL(pthread_rwlock_unlock(&lock), 0);
    return unused;
}

static void readers_are_shared(void)
{
    pthread_t threads[3];
    EQUAL(pthread_barrier_init(&inside, NULL, 3), 0);
    for (int i = 0; i < 3; i++)
        threads[i] = start(meet_inside, NULL);
    for (int i = 0; i < 3; i++)
        end(threads[i]);
}

static int timed_read(pthread_rwlock_t *timed)
{
    struct timespec at = in_ms(CLOCK_REALTIME, 20);
    int result = pthread_rwlock_timedrdlock(timed, &at);
    EQUAL(result != ETIMEDOUT || is_past(CLOCK_REALTIME, at), 1);
    return result;
}

static int timed_write(pthread_rwlock_t *timed)
{
    struct timespec at = in_ms(CLOCK_REALTIME, 20);
    int result = pthread_rwlock_timedwrlock(timed, &at);
    EQUAL(result != ETIMEDOUT || is_past(CLOCK_REALTIME, at), 1);
    return result;
}

static int clocked_read(pthread_rwlock_t *timed)
{
    struct timespec at = in_ms(CLOCK_MONOTONIC, 20);
    return pthread_rwlock_clockrdlock(timed, CLOCK_MONOTONIC, &at);
}

static int clocked_write(pthread_rwlock_t *timed)
{
    struct timespec at = in_ms(CLOCK_MONOTONIC, 20);
    return pthread_rwlock_clockwrlock(timed, CLOCK_MONOTONIC, &at);
}

static int badly_timed(pthread_rwlock_t *timed)
{
    struct timespec at = {0, -1};
    return pthread_rwlock_timedwrlock(timed, &at);
}

static int by_another_clock(pthread_rwlock_t *timed)
{
    struct timespec at = {0, 0};
    return pthread_rwlock_clockrdlock(timed, CLOCK_PROCESS_CPUTIME_ID, &at);
}

static void has_codes(pthread_rwlock_t *tried)
{
    EQUAL(pthread_rwlock_unlock(tried), EPERM);
    EQUAL(pthread_rwlock_wrlock(tried), 0);
    EQUAL(pthread_rwlock_wrlock(tried), EDEADLK);
    EQUAL(pthread_rwlock_rdlock(tried), EDEADLK);
    EQUAL(timed_read(tried), EDEADLK);
    EQUAL(timed_write(tried), EDEADLK);
    EQUAL(pthread_rwlock_tryrdlock(tried), EBUSY);
    EQUAL(pthread_rwlock_trywrlock(tried), EBUSY);
    EQUAL(ELSEWHERE(pthread_rwlock_tryrdlock, tried), EBUSY);
    EQUAL(ELSEWHERE(pthread_rwlock_unlock, tried), EPERM);
    EQUAL(ELSEWHERE(timed_read, tried), ETIMEDOUT);
    EQUAL(ELSEWHERE(timed_write, tried), ETIMEDOUT);
    EQUAL(ELSEWHERE(clocked_read, tried), ETIMEDOUT);
    EQUAL(ELSEWHERE(clocked_write, tried), ETIMEDOUT);
    EQUAL(ELSEWHERE(badly_timed, tried), EINVAL);
    EQUAL(ELSEWHERE(by_another_clock, tried), EINVAL);
    EQUAL(pthread_rwlock_destroy(tried), EBUSY);
    EQUAL(pthread_rwlock_unlock(tried), 0);
    EQUAL(pthread_rwlock_rdlock(tried), 0);
    EQUAL(ELSEWHERE(pthread_rwlock_trywrlock, tried), EBUSY);
    EQUAL(ELSEWHERE(timed_write, tried), ETIMEDOUT);
    EQUAL(pthread_rwlock_tryrdlock(tried), 0);
    EQUAL(pthread_rwlock_unlock(tried), 0);
    EQUAL(pthread_rwlock_destroy(tried), EBUSY);
    EQUAL(pthread_rwlock_unlock(tried), 0);
    EQUAL(timed_read(tried), 0);
    EQUAL(pthread_rwlock_unlock(tried), 0);
    EQUAL(clocked_write(tried), 0);
    EQUAL(pthread_rwlock_unlock(tried), 0);
    EQUAL(pthread_rwlock_unlock(tried), EPERM);
    EQUAL(pthread_rwlock_destroy(tried), 0);
}

static pid_t writer_thread;

static void *write_once(void *argument)
{
    __atomic_store_n(&writer_thread, (pid_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
    EQUAL(pthread_rwlock_wrlock(argument), 0);
    EQUAL(pthread_rwlock_unlock(argument), 0);
    return NULL;
}

/* The result for a reader that locks again while a writer waits. */
static int read_again_past_a_writer(pthread_rwlock_t *tried)
{
    writer_thread = 0;
    EQUAL(pthread_rwlock_rdlock(tried), 0);
    pthread_t writer = start(write_once, tried);
    while (!__atomic_load_n(&writer_thread, __ATOMIC_ACQUIRE) || !is_asleep(writer_thread))
        sleep_ms(1);
    int result = timed_read(tried);
    if (result == 0)
        EQUAL(pthread_rwlock_unlock(tried), 0);
    EQUAL(pthread_rwlock_unlock(tried), 0);
    end(writer);
    return result;
}

static void kinds(void)
{
    static pthread_rwlock_t in_line = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
    pthread_rwlock_t made_in_line;
    pthread_rwlockattr_t attr;
    memset(&made_in_line, 0xa5, sizeof made_in_line);
    EQUAL(pthread_rwlockattr_init(&attr), 0);
    EQUAL(pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP), 0);
    EQUAL(pthread_rwlock_init(&made_in_line, &attr), 0);
    EQUAL(read_again_past_a_writer(&lock), 0);
    EQUAL(read_again_past_a_writer(&in_line), ETIMEDOUT);
    EQUAL(read_again_past_a_writer(&made_in_line), ETIMEDOUT);
    has_codes(&made_in_line);
}

static void shared_ones_are_passed_on(void)
{
    struct { pthread_rwlock_t lock; long value; int tried; } *shared = shared_memory(sizeof *shared);
    pthread_rwlockattr_t attr;
    EQUAL(pthread_rwlockattr_init(&attr), 0);
    EQUAL(pthread_rwlockattr_setpshared(&attr, PTHREAD_PROCESS_SHARED), 0);
    EQUAL(pthread_rwlock_init(&shared->lock, &attr), 0);
    EQUAL(pthread_rwlock_wrlock(&shared->lock), 0);
    pid_t child = forked();
    if (child == 0) {
        EQUAL(pthread_rwlock_tryrdlock(&shared->lock), EBUSY);
        EQUAL(timed_write(&shared->lock), ETIMEDOUT);
        EQUAL(clocked_read(&shared->lock), ETIMEDOUT);
        __atomic_store_n(&shared->tried, 1, __ATOMIC_RELEASE);
        EQUAL(pthread_rwlock_rdlock(&shared->lock), 0);
        EQUAL(shared->value, 1);
        EQUAL(pthread_rwlock_unlock(&shared->lock), 0);
        _exit(0);
    }
    while (!__atomic_load_n(&shared->tried, __ATOMIC_ACQUIRE))
        sleep_ms(1);
    sleep_ms(20); /* so that it may fall asleep */
    shared->value = 1;
    EQUAL(pthread_rwlock_unlock(&shared->lock), 0);
    EQUAL(exit_of(child), 0);
    EQUAL(pthread_rwlock_destroy(&shared->lock), 0);
}

int main(void)
{
    pthread_rwlock_t made_plain;
    begin();
    writers_exclude();
    readers_are_shared();
    kinds();
    memset(&made_plain, 0xa5, sizeof made_plain);
    EQUAL(pthread_rwlock_init(&made_plain, NULL), 0);
    has_codes(&made_plain);
    has_codes(&lock);
    shared_ones_are_passed_on();
    return 0;
}
