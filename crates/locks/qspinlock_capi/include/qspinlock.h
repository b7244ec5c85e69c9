/*
 * qspinlock.h: queued spin locks in user space that sleep; four bytes each, eight for readers and writers.
 *
 * Made from the sources of crates/locks/qspinlock_capi; changes go there. docs/how-to/qspinlock-c.md has an example.
 *
 *     qspin_native_t   first in, first out; spins only: for threads that have a core each
 *     qspin_fifo_t     first in, first out; waiters spin for a while, then sleep
 *     qspin_fair_t     the same, but newcomers use the lock, a bounded number of times, until a sleeping waiter is awake
 *     qspin_hybrid_t   as fast as an unfair lock; waiters queue, and are passed a bounded number of times
 *     qspin_rwlock_t   many readers or one writer, in the order of fair locks; the one with eight bytes
 *
 * Results. As those of pthread_spin_* and pthread_mutex_*: 0, or a positive number of <errno.h>. errno itself is left
 * alone. No call ends the program, and nothing is thrown.
 *
 * Life. Zeroed memory, or a variable with QSPIN_..._INIT, is a free lock. Nothing belongs to a lock but its own bytes,
 * so it may be forgotten while it is free and nobody waits. It must not be moved or copied while threads use it.
 *
 * Threads. Any thread may unlock, not only the one that locked. A thread that locks what it holds waits for ever. Locks
 * belong to one process: put into shared memory they work within each process only, so do not.
 *
 * Signals. A handler may use locks that the thread it interrupts does not hold. unlock, trylock, is_locked do not wait.
 *
 * Fork. A lock that the forking thread holds is held in the child, by the thread that exists there; unlock it in both.
 * One that another thread held stays held in the child for ever. Waiters are the parent's. A rwlock that somebody waited
 * for is of no use in the child.
 */


#ifndef QSPINLOCK_H
#define QSPINLOCK_H

#include <stdint.h>
#include <time.h>

/* A free lock: static qspin_fair_t lock = QSPIN_FAIR_INIT; */
#define QSPIN_NATIVE_INIT { 0 }
#define QSPIN_FIFO_INIT { 0 }
#define QSPIN_FAIR_INIT { 0 }
#define QSPIN_HYBRID_INIT { 0 }
#define QSPIN_RWLOCK_INIT { { 0, 0 } }


// Version of this header: major << 16 | minor << 8 | patch.
#define QSPIN_VERSION 256

// A lock that is handed over first in, first out. Waiters spin, however long: for threads that have a core each.
typedef struct qspin_native_t {
    // Of this library.
    uint32_t opaque;
} qspin_native_t;

// A lock that is handed over first in, first out, to sleeping waiters too: it is idle while they wake up.
typedef struct qspin_fifo_t {
    // Of this library.
    uint32_t opaque;
} qspin_fifo_t;

// A lock that waiters have first in, first out; newcomers use it while the one whose turn it is wakes up.
typedef struct qspin_fair_t {
    // Of this library.
    uint32_t opaque;
} qspin_fair_t;

// A lock that newcomers may take past the queue, a bounded number of times in a row. Waiters spin, then sleep.
typedef struct qspin_hybrid_t {
    // Of this library.
    uint32_t opaque;
} qspin_hybrid_t;

// A lock for many readers or one writer, first in, first out. Waiters spin for a while, then sleep.
typedef struct qspin_rwlock_t {
    // Of this library.
    uint32_t opaque[2];
} qspin_rwlock_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a free lock of memory that nobody uses. EINVAL: NULL, or not aligned to 4 bytes; so for all calls.
int qspin_native_init(struct qspin_native_t *lock);

// Takes the lock, however long that takes.
int qspin_native_lock(struct qspin_native_t *lock);

// Takes the lock if it is free and nobody is to have it first. Never waits. EBUSY: it did not.
int qspin_native_trylock(struct qspin_native_t *lock);

// Takes the lock unless CLOCK_MONOTONIC shows `deadline_ns` nanoseconds first (see qspin_deadline_in). A lock that is
// free is taken even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_native_timedlock(struct qspin_native_t *lock,
                           uint64_t deadline_ns);

// As above, with CLOCK_MONOTONIC or CLOCK_REALTIME and a reading of it. EINVAL: another clock, no deadline, or
// nanoseconds that are not below a second.
int qspin_native_clocklock(struct qspin_native_t *lock,
                           int clock,
                           const struct timespec *deadline);

// Lets the lock go. EPERM: nobody held it, and nothing was done.
int qspin_native_unlock(struct qspin_native_t *lock);

// Lets the lock go to the oldest waiter, whatever the kind of lock. EPERM: nobody held it, and nothing was done.
int qspin_native_unlock_fair(struct qspin_native_t *lock);

// 1 if somebody holds the lock at this moment, 0 if not, or if there is no lock at `lock`.
int qspin_native_is_locked(const struct qspin_native_t *lock);

// Says whether the memory may go: EBUSY if the lock is held or waited for. It collects what waiters left behind that
// gave up at a deadline; a lock without such waiters needs no destroying. It is a free lock afterwards.
int qspin_native_destroy(struct qspin_native_t *lock);

// Makes a free lock of memory that nobody uses. EINVAL: NULL, or not aligned to 4 bytes; so for all calls.
int qspin_fifo_init(struct qspin_fifo_t *lock);

// Takes the lock, however long that takes.
int qspin_fifo_lock(struct qspin_fifo_t *lock);

// Takes the lock if it is free and nobody is to have it first. Never waits. EBUSY: it did not.
int qspin_fifo_trylock(struct qspin_fifo_t *lock);

// Takes the lock unless CLOCK_MONOTONIC shows `deadline_ns` nanoseconds first (see qspin_deadline_in). A lock that is
// free is taken even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_fifo_timedlock(struct qspin_fifo_t *lock,
                         uint64_t deadline_ns);

// As above, with CLOCK_MONOTONIC or CLOCK_REALTIME and a reading of it. EINVAL: another clock, no deadline, or
// nanoseconds that are not below a second.
int qspin_fifo_clocklock(struct qspin_fifo_t *lock,
                         int clock,
                         const struct timespec *deadline);

// Lets the lock go. EPERM: nobody held it, and nothing was done.
int qspin_fifo_unlock(struct qspin_fifo_t *lock);

// Lets the lock go to the oldest waiter, whatever the kind of lock. EPERM: nobody held it, and nothing was done.
int qspin_fifo_unlock_fair(struct qspin_fifo_t *lock);

// 1 if somebody holds the lock at this moment, 0 if not, or if there is no lock at `lock`.
int qspin_fifo_is_locked(const struct qspin_fifo_t *lock);

// Says whether the memory may go: EBUSY if the lock is held or waited for. It collects what waiters left behind that
// gave up at a deadline; a lock without such waiters needs no destroying. It is a free lock afterwards.
int qspin_fifo_destroy(struct qspin_fifo_t *lock);

// Makes a free lock of memory that nobody uses. EINVAL: NULL, or not aligned to 4 bytes; so for all calls.
int qspin_fair_init(struct qspin_fair_t *lock);

// Takes the lock, however long that takes.
int qspin_fair_lock(struct qspin_fair_t *lock);

// Takes the lock if it is free and nobody is to have it first. Never waits. EBUSY: it did not.
int qspin_fair_trylock(struct qspin_fair_t *lock);

// Takes the lock unless CLOCK_MONOTONIC shows `deadline_ns` nanoseconds first (see qspin_deadline_in). A lock that is
// free is taken even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_fair_timedlock(struct qspin_fair_t *lock,
                         uint64_t deadline_ns);

// As above, with CLOCK_MONOTONIC or CLOCK_REALTIME and a reading of it. EINVAL: another clock, no deadline, or
// nanoseconds that are not below a second.
int qspin_fair_clocklock(struct qspin_fair_t *lock,
                         int clock,
                         const struct timespec *deadline);

// Lets the lock go. EPERM: nobody held it, and nothing was done.
int qspin_fair_unlock(struct qspin_fair_t *lock);

// Lets the lock go to the oldest waiter, whatever the kind of lock. EPERM: nobody held it, and nothing was done.
int qspin_fair_unlock_fair(struct qspin_fair_t *lock);

// 1 if somebody holds the lock at this moment, 0 if not, or if there is no lock at `lock`.
int qspin_fair_is_locked(const struct qspin_fair_t *lock);

// Says whether the memory may go: EBUSY if the lock is held or waited for. It collects what waiters left behind that
// gave up at a deadline; a lock without such waiters needs no destroying. It is a free lock afterwards.
int qspin_fair_destroy(struct qspin_fair_t *lock);

// Makes a free lock of memory that nobody uses. EINVAL: NULL, or not aligned to 4 bytes; so for all calls.
int qspin_hybrid_init(struct qspin_hybrid_t *lock);

// Takes the lock, however long that takes.
int qspin_hybrid_lock(struct qspin_hybrid_t *lock);

// Takes the lock if it is free and nobody is to have it first. Never waits. EBUSY: it did not.
int qspin_hybrid_trylock(struct qspin_hybrid_t *lock);

// Takes the lock unless CLOCK_MONOTONIC shows `deadline_ns` nanoseconds first (see qspin_deadline_in). A lock that is
// free is taken even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_hybrid_timedlock(struct qspin_hybrid_t *lock,
                           uint64_t deadline_ns);

// As above, with CLOCK_MONOTONIC or CLOCK_REALTIME and a reading of it. EINVAL: another clock, no deadline, or
// nanoseconds that are not below a second.
int qspin_hybrid_clocklock(struct qspin_hybrid_t *lock,
                           int clock,
                           const struct timespec *deadline);

// Lets the lock go. EPERM: nobody held it, and nothing was done.
int qspin_hybrid_unlock(struct qspin_hybrid_t *lock);

// Lets the lock go to the oldest waiter, whatever the kind of lock. EPERM: nobody held it, and nothing was done.
int qspin_hybrid_unlock_fair(struct qspin_hybrid_t *lock);

// 1 if somebody holds the lock at this moment, 0 if not, or if there is no lock at `lock`.
int qspin_hybrid_is_locked(const struct qspin_hybrid_t *lock);

// Says whether the memory may go: EBUSY if the lock is held or waited for. It collects what waiters left behind that
// gave up at a deadline; a lock without such waiters needs no destroying. It is a free lock afterwards.
int qspin_hybrid_destroy(struct qspin_hybrid_t *lock);

// Makes a free lock of memory that nobody uses. EINVAL: NULL, or not aligned to 4 bytes; so for all calls.
int qspin_rwlock_init(struct qspin_rwlock_t *lock);

// Takes the lock together with other readers, however long that takes. Not for a thread that has it already, for
// reading or writing: it may wait for a writer that waits for it.
int qspin_rwlock_rdlock(struct qspin_rwlock_t *lock);

// As above, for a thread that may have it for reading already: waits for the writer that has the lock, but for none
// that stands in line.
int qspin_rwlock_rdlock_recursive(struct qspin_rwlock_t *lock);

// Takes the lock alone, however long that takes. Not for a thread that has it already.
int qspin_rwlock_wrlock(struct qspin_rwlock_t *lock);

// Takes the lock together with other readers if no writer has it or is to have it first. Never waits. EBUSY: it did
// not.
int qspin_rwlock_tryrdlock(struct qspin_rwlock_t *lock);

// Takes the lock together with other readers if no writer has it. Never waits. EBUSY: it did not.
int qspin_rwlock_tryrdlock_recursive(struct qspin_rwlock_t *lock);

// Takes the lock alone if nobody has it or is to have it first. Never waits. EBUSY: it did not.
int qspin_rwlock_trywrlock(struct qspin_rwlock_t *lock);

// As qspin_rwlock_rdlock, unless CLOCK_MONOTONIC shows `deadline_ns` nanoseconds first (see qspin_deadline_in).
// ETIMEDOUT: not taken.
int qspin_rwlock_timedrdlock(struct qspin_rwlock_t *lock,
                             uint64_t deadline_ns);

// As qspin_rwlock_rdlock_recursive, with a deadline as above.
int qspin_rwlock_timedrdlock_recursive(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// As qspin_rwlock_wrlock, with a deadline as above.
int qspin_rwlock_timedwrlock(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// As qspin_rwlock_timedrdlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a reading of it. EINVAL: another clock, no
// deadline, or nanoseconds that are not below a second.
int qspin_rwlock_clockrdlock(struct qspin_rwlock_t *lock,
                             int clock,
                             const struct timespec *deadline);

// As qspin_rwlock_timedrdlock_recursive, with a clock and a deadline as above.
int qspin_rwlock_clockrdlock_recursive(struct qspin_rwlock_t *lock,
                                       int clock,
                                       const struct timespec *deadline);

// As qspin_rwlock_timedwrlock, with a clock and a deadline as above.
int qspin_rwlock_clockwrlock(struct qspin_rwlock_t *lock, int clock, const struct timespec *deadline);

// Ends one reader's access. EPERM: no reader had it, and nothing was done.
int qspin_rwlock_rdunlock(struct qspin_rwlock_t *lock);

// Ends the writer's access. EPERM: no writer had it, and nothing was done.
int qspin_rwlock_wrunlock(struct qspin_rwlock_t *lock);

// 2 if a writer has the lock at this moment, 1 if readers have it, 0 if nobody has, or if there is no lock at `lock`.
int qspin_rwlock_is_locked(const struct qspin_rwlock_t *lock);

// Says whether the memory may go: EBUSY if somebody has the lock or waits for it. It collects what waiters left behind
// that gave up at a deadline; a lock without such waiters needs no destroying. It is a free lock afterwards.
int qspin_rwlock_destroy(struct qspin_rwlock_t *lock);

// The reading that CLOCK_MONOTONIC will have in `timeout_ns` nanoseconds: a deadline for the timedlock calls. The
// largest number there is, which never comes, if the sum is larger than that.
uint64_t qspin_deadline_in(uint64_t timeout_ns);

// Version of the library that is running: as QSPIN_VERSION.
uint32_t qspin_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QSPINLOCK_H */
