/* pthread_spin_* between processes: exclusion, codes, and waiting for long. */
#include "check.h"

enum { ROUNDS = 200000 };
struct shared {
    pthread_spinlock_t lock;
    long counter;
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
    pid_t child = fork();
    count(shared);
    if (child == 0)
        _exit(0);
    EQUAL(exit_of(child), 0);
    EQUAL(shared->counter, 2L * ROUNDS);
}

static void wakes_a_process_that_sleeps(struct shared *shared)
{
    EQUAL(pthread_spin_lock(&shared->lock), 0);
    pid_t child = fork();
    if (child == 0) {
        EQUAL(pthread_spin_trylock(&shared->lock), EBUSY);
        EQUAL(pthread_spin_lock(&shared->lock), 0);
        _exit(shared->counter == -1 ? 0 : 1);
    }
    sleep_ms(100);
    shared->counter = -1;
    EQUAL(pthread_spin_unlock(&shared->lock), 0);
    EQUAL(exit_of(child), 0);
    /* The child has ended with it. */
    EQUAL(pthread_spin_trylock(&shared->lock), EBUSY);
    EQUAL(pthread_spin_destroy(&shared->lock), EBUSY);
    EQUAL(pthread_spin_unlock(&shared->lock), 0);
}

int main(void)
{
    struct shared *shared = shared_memory(sizeof *shared);
    begin();
    EQUAL(pthread_spin_init(&shared->lock, PTHREAD_PROCESS_SHARED), 0);
    TRUE((unsigned)shared->lock >= 0xffffc000u);
    EQUAL(pthread_spin_unlock(&shared->lock), EPERM);
    excludes_processes(shared);
    wakes_a_process_that_sleeps(shared);
    EQUAL(pthread_spin_destroy(&shared->lock), 0);
    return 0;
}
