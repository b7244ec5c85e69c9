/* pthread_spin_* between processes: exclusion, return codes, and long waits. */
#include "check.h"

enum { ROUNDS = 200000 };
struct shared {
    pthread_spinlock_t lock;
    long counter;
    int about_to_lock;
};

static void count(struct shared *shared)
{
    for (int i = 0; i < ROUNDS; i++) {
        EQUAL(pthread_spin_lock(&shared->lock), 0);
        shared->counter++;
        EQUAL(pthread_spin_unlock(&shared->lock), 0);
    }
}

static void excludes_processes(struct shared *shared)
{
    pid_t child = forked();
    count(shared);
    if (child == 0)
        _exit(0);
    EQUAL(exit_of(child), 0);
    EQUAL(shared->counter, 2L * ROUNDS);
}

/* Ends only if the process sleeps. */
static void until_asleep(struct shared *shared, pid_t child)
{
    while (!__atomic_load_n(&shared->about_to_lock, __ATOMIC_ACQUIRE) || !is_asleep(child))
        sleep_ms(1);
}

static void wakes_a_process_that_sleeps(struct shared *shared)
{
    EQUAL(pthread_spin_lock(&shared->lock), 0);
    pid_t child = forked();
    if (child == 0) {
        EQUAL(pthread_spin_trylock(&shared->lock), EBUSY);
        __atomic_store_n(&shared->about_to_lock, 1, __ATOMIC_RELEASE);
        EQUAL(pthread_spin_lock(&shared->lock), 0);
        _exit(shared->counter == -1 ? 0 : 1);
    }
    until_asleep(shared, child);
    shared->counter = -1;
    EQUAL(pthread_spin_unlock(&shared->lock), 0);
    EQUAL(exit_of(child), 0);
    /* The child has ended while holding the lock. */
    EQUAL(pthread_spin_trylock(&shared->lock), EBUSY);
    EQUAL(pthread_spin_destroy(&shared->lock), EBUSY);
    EQUAL(pthread_spin_unlock(&shared->lock), 0);
}

static void wakes_one_after_the_other(struct shared *shared)
{
    pid_t children[3];
    EQUAL(pthread_spin_lock(&shared->lock), 0);
    for (int i = 0; i < 3; i++) {
        children[i] = forked();
        if (children[i] == 0) {
            EQUAL(pthread_spin_lock(&shared->lock), 0);
            sleep_ms(20); /* so that the others are asleep when this ends */
            EQUAL(pthread_spin_unlock(&shared->lock), 0);
            _exit(0);
        }
    }
    sleep_ms(100);
    EQUAL(pthread_spin_unlock(&shared->lock), 0);
    for (int i = 0; i < 3; i++)
        EQUAL(exit_of(children[i]), 0);
}

int main(void)
{
    struct shared *shared = shared_memory(sizeof *shared);
    begin();
    EQUAL(pthread_spin_init(&shared->lock, PTHREAD_PROCESS_SHARED), 0);
    TRUE((unsigned)shared->lock >= 0xffff0000u);
    EQUAL(pthread_spin_unlock(&shared->lock), EPERM);
    excludes_processes(shared);
    wakes_a_process_that_sleeps(shared);
    wakes_one_after_the_other(shared);
    EQUAL(pthread_spin_destroy(&shared->lock), 0);
    return 0;
}
