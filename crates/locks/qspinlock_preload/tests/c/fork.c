/* Forks: handlers that lock before and unlock after, and a child whose parent has waiters. */
#include "check.h"

static pthread_mutex_t plain = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t recursive = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_mutex_t checked = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_spinlock_t spin;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static int stop, waiting, ready;

static void lock_all(void)
{
    EQUAL(pthread_mutex_lock(&plain), 0);
    EQUAL(pthread_mutex_lock(&recursive), 0);
    EQUAL(pthread_mutex_lock(&checked), 0);
    EQUAL(pthread_rwlock_wrlock(&rwlock), 0);
    EQUAL(pthread_spin_lock(&spin), 0);
}

static void unlock_all(void)
{
    EQUAL(pthread_spin_unlock(&spin), 0);
    EQUAL(pthread_rwlock_unlock(&rwlock), 0);
    EQUAL(pthread_mutex_unlock(&checked), 0);
    EQUAL(pthread_mutex_unlock(&recursive), 0);
    EQUAL(pthread_mutex_unlock(&plain), 0);
}

static void *lock_on_and_on(void *unused)
{
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        lock_all();
        unlock_all();
    }
    return unused;
}

static void *become_ready(void *unused)
{
    lock_all();
    ready = 1;
    unlock_all();
    EQUAL(pthread_cond_signal(&cond), 0);
    return unused;
}

/* In a child, without the parent's other threads: all locks and waits work, also between new threads. */
static void all_works(void)
{
    struct timespec at = in_ms(CLOCK_REALTIME, 5);
    lock_all();
    unlock_all();
    EQUAL(pthread_cond_signal(&cond), 0);
    EQUAL(pthread_mutex_lock(&plain), 0);
    EQUAL(pthread_cond_timedwait(&cond, &plain, &at), ETIMEDOUT);
    ready = 0;
    pthread_t thread = start(become_ready, NULL);
    while (!ready)
        EQUAL(pthread_cond_wait(&cond, &plain), 0);
    EQUAL(pthread_mutex_unlock(&plain), 0);
    end(thread);
    EQUAL(pthread_cond_destroy(&cond), 0);
}

static void *wait_for_stop(void *unused)
{
    EQUAL(pthread_mutex_lock(&plain), 0);
    waiting++;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
        EQUAL(pthread_cond_wait(&cond, &plain), 0);
    EQUAL(pthread_mutex_unlock(&plain), 0);
    return unused;
}

int main(void)
{
    enum { LOCKERS = 3, WAITERS = 2, FORKS = 60 };
    pthread_t threads[LOCKERS + WAITERS];
    begin();
    EQUAL(pthread_spin_init(&spin, PTHREAD_PROCESS_PRIVATE), 0);
    EQUAL(pthread_atfork(lock_all, unlock_all, unlock_all), 0);
    for (int i = 0; i < LOCKERS + WAITERS; i++)
        threads[i] = start(i < LOCKERS ? lock_on_and_on : wait_for_stop, NULL);
    for (int there = 0; there < WAITERS;) {
        EQUAL(pthread_mutex_lock(&plain), 0);
        there = waiting;
        EQUAL(pthread_mutex_unlock(&plain), 0);
    }
    for (int i = 0; i < FORKS; i++) {
        pid_t child = forked();
        if (child == 0) {
            all_works();
            _exit(0);
        }
        EQUAL(exit_of(child), 0);
    }
    EQUAL(pthread_mutex_lock(&plain), 0);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    EQUAL(pthread_cond_broadcast(&cond), 0);
    EQUAL(pthread_mutex_unlock(&plain), 0);
    for (int i = 0; i < LOCKERS + WAITERS; i++)
        end(threads[i]);
    return 0;
}
