/* Condition variables that are destroyed and unmapped as soon as all waiters are woken. */
#include "check.h"

enum { WAITERS = 3, TIMED_ROUNDS = 4000, CANCELLED_ROUNDS = 500 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t round_begins, round_ends;
static pthread_cond_t *cond;
static struct timespec until;
static int waiting;

static void make(void)
{
    EQUAL(mprotect(cond, 4096, PROT_READ | PROT_WRITE), 0);
    EQUAL(pthread_cond_init(cond, NULL), 0);
    waiting = 0;
}

/* Called with the mutex held, once all threads are in their waits. */
static void wake_all_and_take_away(void)
{
    EQUAL(pthread_cond_broadcast(cond), 0);
    EQUAL(pthread_cond_destroy(cond), 0);
    EQUAL(mprotect(cond, 4096, PROT_NONE), 0);
    EQUAL(pthread_mutex_unlock(&mutex), 0);
}

static void lock_when_waiting(int threads)
{
    for (;;) {
        EQUAL(pthread_mutex_lock(&mutex), 0);
        if (waiting == threads)
            return;
        EQUAL(pthread_mutex_unlock(&mutex), 0);
        sched_yield();
    }
}

static struct timespec in_us(long us)
{
    struct timespec at = in_ms(CLOCK_MONOTONIC, us / 1000);
    at.tv_nsec += us % 1000 * 1000;
    if (at.tv_nsec >= 1000000000) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000;
    }
    return at;
}

static void *wait_in_each_round(void *unused)
{
    for (int i = 0; i < TIMED_ROUNDS; i++) {
        pthread_barrier_wait(&round_begins);
        EQUAL(pthread_mutex_lock(&mutex), 0);
        waiting++;
        int result = pthread_cond_clockwait(cond, &mutex, CLOCK_MONOTONIC, &until);
        TRUE(result == 0 || result == ETIMEDOUT);
        EQUAL(pthread_mutex_unlock(&mutex), 0);
        pthread_barrier_wait(&round_ends);
    }
    return unused;
}

/* The broadcast comes between shortly before and shortly after the waits' timeout. */
static void broadcast_as_the_time_runs_out(void)
{
    pthread_t threads[WAITERS];
    pthread_barrier_init(&round_begins, NULL, WAITERS + 1);
    pthread_barrier_init(&round_ends, NULL, WAITERS + 1);
    for (int i = 0; i < WAITERS; i++)
        threads[i] = start(wait_in_each_round, NULL);
    for (int i = 0; i < TIMED_ROUNDS; i++) {
        make();
        until = in_us(100);
        struct timespec then = in_us(100 + i % 150);
        pthread_barrier_wait(&round_begins);
        lock_when_waiting(WAITERS);
        while (!is_past(CLOCK_MONOTONIC, then)) {
        }
        wake_all_and_take_away();
        pthread_barrier_wait(&round_ends);
    }
    for (int i = 0; i < WAITERS; i++)
        end(threads[i]);
}

static void unlock(void *unused)
{
    (void)unused;
    EQUAL(pthread_mutex_unlock(&mutex), 0);
}

static void *wait_once(void *unused)
{
    EQUAL(pthread_mutex_lock(&mutex), 0);
    pthread_cleanup_push(unlock, NULL);
    waiting++;
    EQUAL(pthread_cond_wait(cond, &mutex), 0);
    pthread_cleanup_pop(1);
    return unused;
}

/* The first waiter is signalled and cancelled, so it may have to pass the signal on; then all others are woken. */
static void broadcast_as_a_signalled_waiter_is_cancelled(void)
{
    for (int i = 0; i < CANCELLED_ROUNDS; i++) {
        pthread_t threads[WAITERS];
        make();
        for (int started = 0; started < WAITERS; started++) {
            threads[started] = start(wait_once, NULL);
            lock_when_waiting(started + 1);
            if (started + 1 < WAITERS)
                EQUAL(pthread_mutex_unlock(&mutex), 0);
        }
        if (i % 3 == 0)
            EQUAL(pthread_cond_signal(cond), 0);
        EQUAL(pthread_cancel(threads[0]), 0);
        if (i % 3 == 1)
            EQUAL(pthread_cond_signal(cond), 0);
        wake_all_and_take_away();
        for (int thread = 0; thread < WAITERS; thread++)
            end(threads[thread]);
    }
}

int main(void)
{
    begin();
    alarm(900); /* a busy machine is slow, not hung */
    cond = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TRUE(cond != MAP_FAILED);
    broadcast_as_the_time_runs_out();
    broadcast_as_a_signalled_waiter_is_cancelled();
    return 0;
}
