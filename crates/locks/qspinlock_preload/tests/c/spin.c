/* pthread_spin_*, private locks: exclusion, return codes, and the bytes. See also: shared locks (spin_shared.c). */
#include "check.h"

enum { THREADS = 4, ROUNDS = 50000 };
static pthread_spinlock_t lock;
static long counter;

static void *count(void *unused)
{
    for (int i = 0; i < ROUNDS; i++) {
        EQUAL(pthread_spin_lock(&lock), 0);
        counter++;
        EQUAL(pthread_spin_unlock(&lock), 0);
    }
    return unused;
}

static void excludes(void)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        threads[i] = start(count, NULL);
    for (int i = 0; i < THREADS; i++)
        end(threads[i]);
    EQUAL(counter, (long)THREADS * ROUNDS);
}

static void has_codes(void)
{
    EQUAL(pthread_spin_unlock(&lock), EPERM);
    EQUAL(pthread_spin_trylock(&lock), 0);
    EQUAL(pthread_spin_trylock(&lock), EBUSY);
    EQUAL(ELSEWHERE(pthread_spin_trylock, &lock), EBUSY);
    EQUAL(pthread_spin_destroy(&lock), EBUSY);
    EQUAL(ELSEWHERE(pthread_spin_unlock, &lock), 0);
    EQUAL(ELSEWHERE(pthread_spin_lock, &lock), 0);
    EQUAL(pthread_spin_unlock(&lock), 0);
    EQUAL(pthread_spin_destroy(&lock), 0);
}

int main(void)
{
    static pthread_spinlock_t zeros;
    begin();
    lock = 1;
    EQUAL(pthread_spin_init(&lock, PTHREAD_PROCESS_PRIVATE), 0);
    EQUAL(lock, 0);
    excludes();
    has_codes();
    EQUAL(pthread_spin_lock((pthread_spinlock_t *)&zeros), 0);
    EQUAL(pthread_spin_unlock(&zeros), 0);
    return 0;
}
