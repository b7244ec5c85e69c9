/*
 * Each mistake that a lock detects, for each kind of lock: the call returns an error number of <errno.h> and does not
 * change the lock.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qspinlock.h"

#define EXPECT(value, call)                                                             \
    do {                                                                                \
        int is = (call);                                                                \
        if (is != (value)) {                                                            \
            fprintf(stderr, "line %d: %s is %d, not %s\n", __LINE__, #call, is, #value); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

#define CHECK_KIND(kind, KIND)                                                                          \
    static void check_##kind(void)                                                                      \
    {                                                                                                   \
        static qspin_##kind##_t fixed = QSPIN_##KIND##_INIT;                                            \
        struct timespec past = {-5, 0}, crooked = {0, 1000000000}, negative = {0, -1};                  \
        union { char bytes[8]; qspin_##kind##_t lock; } memory;                                         \
        qspin_##kind##_t *lock = &memory.lock, *askew = (qspin_##kind##_t *)(void *)(memory.bytes + 1); \
        qspin_##kind##_t *nothing = NULL;                                                               \
                                                                                                        \
        memset(&memory, 0xff, sizeof memory);                                                           \
        EXPECT(0, qspin_##kind##_init(lock));                                                           \
        EXPECT(0, qspin_##kind##_is_locked(lock));                                                      \
        EXPECT(EPERM, qspin_##kind##_unlock(lock));                                                     \
        EXPECT(EPERM, qspin_##kind##_unlock_fair(lock));                                                \
        EXPECT(0, qspin_##kind##_timedlock(lock, 0));                                                   \
        EXPECT(1, qspin_##kind##_is_locked(lock));                                                      \
        EXPECT(EBUSY, qspin_##kind##_trylock(lock));                                                    \
        EXPECT(EBUSY, qspin_##kind##_destroy(lock));                                                    \
        EXPECT(ETIMEDOUT, qspin_##kind##_timedlock(lock, 0));                                           \
        EXPECT(ETIMEDOUT, qspin_##kind##_timedlock(lock, qspin_deadline_in(1000)));                     \
        EXPECT(ETIMEDOUT, qspin_##kind##_clocklock(lock, CLOCK_MONOTONIC, &past));                      \
        EXPECT(ETIMEDOUT, qspin_##kind##_clocklock(lock, CLOCK_REALTIME, &past));                       \
        EXPECT(EINVAL, qspin_##kind##_clocklock(lock, CLOCK_MONOTONIC, &crooked));                      \
        EXPECT(EINVAL, qspin_##kind##_clocklock(lock, CLOCK_MONOTONIC, &negative));                     \
        EXPECT(EINVAL, qspin_##kind##_clocklock(lock, CLOCK_PROCESS_CPUTIME_ID, &past));                \
        EXPECT(EINVAL, qspin_##kind##_clocklock(lock, CLOCK_MONOTONIC, NULL));                          \
        EXPECT(1, qspin_##kind##_is_locked(lock));                                                      \
        EXPECT(0, qspin_##kind##_unlock_fair(lock));                                                    \
        EXPECT(0, qspin_##kind##_trylock(lock));                                                        \
        EXPECT(0, qspin_##kind##_unlock(lock));                                                         \
        EXPECT(0, qspin_##kind##_destroy(lock));                                                        \
        EXPECT(0, qspin_##kind##_lock(&fixed));                                                         \
        EXPECT(0, qspin_##kind##_unlock(&fixed));                                                       \
                                                                                                        \
        EXPECT(EINVAL, qspin_##kind##_init(nothing));                                                   \
        EXPECT(EINVAL, qspin_##kind##_lock(nothing));                                                   \
        EXPECT(EINVAL, qspin_##kind##_trylock(nothing));                                                \
        EXPECT(EINVAL, qspin_##kind##_timedlock(nothing, 0));                                           \
        EXPECT(EINVAL, qspin_##kind##_clocklock(nothing, CLOCK_MONOTONIC, &past));                      \
        EXPECT(EINVAL, qspin_##kind##_unlock(nothing));                                                 \
        EXPECT(EINVAL, qspin_##kind##_unlock_fair(nothing));                                            \
        EXPECT(EINVAL, qspin_##kind##_destroy(nothing));                                                \
        EXPECT(0, qspin_##kind##_is_locked(nothing));                                                   \
        EXPECT(EINVAL, qspin_##kind##_init(askew));                                                     \
        EXPECT(EINVAL, qspin_##kind##_lock(askew));                                                     \
        EXPECT(EINVAL, qspin_##kind##_unlock(askew));                                                   \
        EXPECT(EINVAL, qspin_##kind##_destroy(askew));                                                  \
    }

CHECK_KIND(native, NATIVE)
CHECK_KIND(fifo, FIFO)
CHECK_KIND(fair, FAIR)
CHECK_KIND(hybrid, HYBRID)

static void check_rwlock(void)
{
    static qspin_rwlock_t fixed = QSPIN_RWLOCK_INIT;
    struct timespec past = {-5, 0}, crooked = {0, 1000000000};
    union { char bytes[16]; qspin_rwlock_t lock; } memory;
    qspin_rwlock_t *lock = &memory.lock, *askew = (qspin_rwlock_t *)(void *)(memory.bytes + 2), *nothing = NULL;

    memset(&memory, 0xff, sizeof memory);
    EXPECT(0, qspin_rwlock_init(lock));
    EXPECT(EPERM, qspin_rwlock_rdunlock(lock));
    EXPECT(EPERM, qspin_rwlock_wrunlock(lock));

    EXPECT(0, qspin_rwlock_rdlock(lock)); /* a thread that nests read locks calls rdlock_recursive */
    EXPECT(0, qspin_rwlock_tryrdlock(lock));
    EXPECT(0, qspin_rwlock_rdlock_recursive(lock));
    EXPECT(1, qspin_rwlock_is_locked(lock));
    EXPECT(EBUSY, qspin_rwlock_trywrlock(lock));
    EXPECT(ETIMEDOUT, qspin_rwlock_timedwrlock(lock, qspin_deadline_in(1000)));
    EXPECT(ETIMEDOUT, qspin_rwlock_clockwrlock(lock, CLOCK_REALTIME, &past));
    EXPECT(EINVAL, qspin_rwlock_clockwrlock(lock, CLOCK_REALTIME, &crooked));
    EXPECT(EPERM, qspin_rwlock_wrunlock(lock));
    EXPECT(EBUSY, qspin_rwlock_destroy(lock));
    EXPECT(0, qspin_rwlock_rdunlock(lock));
    EXPECT(0, qspin_rwlock_rdunlock(lock));
    EXPECT(0, qspin_rwlock_rdunlock(lock));
    EXPECT(EPERM, qspin_rwlock_rdunlock(lock));

    EXPECT(0, qspin_rwlock_wrlock(lock));
    EXPECT(2, qspin_rwlock_is_locked(lock));
    EXPECT(EBUSY, qspin_rwlock_tryrdlock(lock));
    EXPECT(EBUSY, qspin_rwlock_tryrdlock_recursive(lock));
    EXPECT(EBUSY, qspin_rwlock_trywrlock(lock));
    EXPECT(ETIMEDOUT, qspin_rwlock_timedrdlock(lock, qspin_deadline_in(1000)));
    EXPECT(ETIMEDOUT, qspin_rwlock_timedrdlock_recursive(lock, 0));
    EXPECT(ETIMEDOUT, qspin_rwlock_clockrdlock(lock, CLOCK_MONOTONIC, &past));
    EXPECT(ETIMEDOUT, qspin_rwlock_clockrdlock_recursive(lock, CLOCK_MONOTONIC, &past));
    EXPECT(EINVAL, qspin_rwlock_clockrdlock(lock, CLOCK_MONOTONIC, NULL));
    EXPECT(EPERM, qspin_rwlock_rdunlock(lock));
    EXPECT(EBUSY, qspin_rwlock_destroy(lock));
    EXPECT(0, qspin_rwlock_wrunlock(lock));
    EXPECT(0, qspin_rwlock_destroy(lock));
    EXPECT(0, qspin_rwlock_is_locked(lock));
    EXPECT(0, qspin_rwlock_wrlock(&fixed));
    EXPECT(0, qspin_rwlock_wrunlock(&fixed));

    EXPECT(EINVAL, qspin_rwlock_init(nothing));
    EXPECT(EINVAL, qspin_rwlock_rdlock(nothing));
    EXPECT(EINVAL, qspin_rwlock_wrlock(nothing));
    EXPECT(EINVAL, qspin_rwlock_rdunlock(nothing));
    EXPECT(EINVAL, qspin_rwlock_wrunlock(nothing));
    EXPECT(EINVAL, qspin_rwlock_timedwrlock(nothing, 0));
    EXPECT(EINVAL, qspin_rwlock_destroy(nothing));
    EXPECT(0, qspin_rwlock_is_locked(nothing));
    EXPECT(EINVAL, qspin_rwlock_init(askew));
    EXPECT(EINVAL, qspin_rwlock_wrlock(askew));
}

int main(void)
{
    EXPECT(8, (int)sizeof(qspin_rwlock_t));
    EXPECT(4, (int)sizeof(qspin_native_t));
    EXPECT(4, (int)sizeof(qspin_fifo_t));
    EXPECT(4, (int)sizeof(qspin_fair_t));
    EXPECT(4, (int)sizeof(qspin_hybrid_t));
    EXPECT(QSPIN_VERSION, (int)qspin_version());
    EXPECT(1, qspin_deadline_in(UINT64_MAX) == UINT64_MAX);
    check_native();
    check_fifo();
    check_fair();
    check_hybrid();
    check_rwlock();
    return 0;
}
