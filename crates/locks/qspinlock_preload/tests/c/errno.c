/* Calls that wait or time out preserve errno. */
#include "check.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_spinlock_t spin, shared_spin;
static pthread_barrier_t all_held, timed_out;

static void *hold_all_for_a_while(void *unused)
{
    EQUAL(pthread_mutex_lock(&mutex), 0);
    EQUAL(pthread_rwlock_wrlock(&rwlock), 0);
    EQUAL(pthread_spin_lock(&spin), 0);
    EQUAL(pthread_spin_lock(&shared_spin), 0);
    pthread_barrier_wait(&all_held);
    pthread_barrier_wait(&timed_out);
    sleep_ms(30);
    EQUAL(pthread_mutex_unlock(&mutex), 0);
    sleep_ms(30);
    EQUAL(pthread_rwlock_unlock(&rwlock), 0);
    sleep_ms(30);
    EQUAL(pthread_spin_unlock(&spin), 0);
    sleep_ms(30);
    EQUAL(pthread_spin_unlock(&shared_spin), 0);
    return unused;
}

int main(void)
{
    struct timespec at;
    begin();
    EQUAL(pthread_spin_init(&spin, PTHREAD_PROCESS_PRIVATE), 0);
    EQUAL(pthread_spin_init(&shared_spin, PTHREAD_PROCESS_SHARED), 0);
    EQUAL(pthread_barrier_init(&all_held, NULL, 2), 0);
    EQUAL(pthread_barrier_init(&timed_out, NULL, 2), 0);
    pthread_t holder = start(hold_all_for_a_while, NULL);
    pthread_barrier_wait(&all_held);
    errno = 77;
    at = in_ms(CLOCK_REALTIME, 10);
    EQUAL(pthread_mutex_timedlock(&mutex, &at), ETIMEDOUT);
    at = in_ms(CLOCK_REALTIME, 10);
    EQUAL(pthread_rwlock_timedrdlock(&rwlock, &at), ETIMEDOUT);
    EQUAL(errno, 77);
    pthread_barrier_wait(&timed_out);
    errno = 77;
    EQUAL(pthread_mutex_lock(&mutex), 0);
    EQUAL(pthread_rwlock_rdlock(&rwlock), 0);
    EQUAL(pthread_spin_lock(&spin), 0);
    EQUAL(pthread_spin_lock(&shared_spin), 0);
    at = in_ms(CLOCK_REALTIME, 10);
    EQUAL(pthread_cond_timedwait(&cond, &mutex, &at), ETIMEDOUT);
    EQUAL(errno, 77);
    end(holder);
    return 0;
}
