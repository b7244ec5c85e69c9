/*
 * qspinlock.h: queued spin locks in user space that sleep; four bytes each, eight for readers and writers.
 *
 * Generated from the sources of crates/locks/qspinlock_capi: change those. docs/how-to/qspinlock-c.md has an example.
 *
 *     qspin_native_t   first in, first out; spins only: for threads that have a core each
 *     qspin_fifo_t     first in, first out; waiters spin for a while, then sleep
 *     qspin_fair_t     the same, but newcomers may use the lock, a bounded number of times, until a sleeping waiter is awake
 *     qspin_hybrid_t   as fast as an unfair lock; newcomers may pass the queue of waiters a bounded number of times
 *     qspin_rwlock_t   many readers or one writer, in the order of fair locks; the one with eight bytes
 *
 * Results. As those of pthread_spin_* and pthread_mutex_*: 0, or a positive number of <errno.h>. Calls do not change
 * errno, do not end the program, and throw nothing.
 *
 * Life. Zeroed memory, or a variable with QSPIN_..._INIT, is a free lock. A lock owns nothing but its own bytes, so a
 * free lock without waiters needs no destroy. Do not move or copy a lock while threads use it.
 *
 * Threads. Any thread may unlock, not only the one that locked. A thread that locks a lock that it holds waits for ever.
 * Do not put locks into shared memory: a lock works within one process only.
 *
 * Signals. A handler may use locks that the interrupted thread does not hold. unlock, trylock, is_locked do not wait.
 *
 * Fork. In the child, the one thread still holds the locks that the forking thread held; unlock them in both processes.
 * A lock that another thread held stays held in the child for ever. Waiters exist only in the parent. A rwlock that had
 * waiters cannot be used in the child.
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

// A lock that goes to waiters first in, first out. Waiters only spin: for threads that have a core each.
typedef struct qspin_native_t {
    // Private to this library.
    uint32_t opaque;
} qspin_native_t;

// A lock that goes to waiters first in, first out, even to a sleeping one: it is idle while that waiter wakes up.
typedef struct qspin_fifo_t {
    // Private to this library.
    uint32_t opaque;
} qspin_fifo_t;

// A lock that goes to waiters first in, first out; newcomers may use it while the next waiter wakes up.
typedef struct qspin_fair_t {
    // Private to this library.
    uint32_t opaque;
} qspin_fair_t;

// A lock that newcomers may take past the queue, a bounded number of times in a row. Waiters spin, then sleep.
typedef struct qspin_hybrid_t {
    // Private to this library.
    uint32_t opaque;
} qspin_hybrid_t;

// A lock for many readers or one writer, first in, first out. Waiters spin for a while, then sleep.
typedef struct qspin_rwlock_t {
    // Private to this library.
    uint32_t opaque[2];
} qspin_rwlock_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Initialises a free lock in memory that no thread uses. EINVAL (of all calls): NULL, or not aligned to 4 bytes.
int qspin_native_init(struct qspin_native_t *lock);

// Takes the lock; waits without limit.
int qspin_native_lock(struct qspin_native_t *lock);

// Takes the lock if it is free and no waiter must have it first. Never waits. EBUSY: not taken.
int qspin_native_trylock(struct qspin_native_t *lock);

// Takes the lock; waits until CLOCK_MONOTONIC shows `deadline_ns` nanoseconds (see qspin_deadline_in). Takes a free
// lock even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_native_timedlock(struct qspin_native_t *lock,
                           uint64_t deadline_ns);

// As timedlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a time of that clock. EINVAL: another clock, no deadline,
// or nanoseconds of a second or more.
int qspin_native_clocklock(struct qspin_native_t *lock,
                           int clock,
                           const struct timespec *deadline);

// Releases the lock. EPERM: the lock was free; nothing has changed.
int qspin_native_unlock(struct qspin_native_t *lock);

// Hands the lock to the oldest waiter, for any type of lock. EPERM: the lock was free; nothing has changed.
int qspin_native_unlock_fair(struct qspin_native_t *lock);

// Returns 1 if a thread holds the lock at this moment; 0 if not, or if `lock` is NULL or not aligned.
int qspin_native_is_locked(const struct qspin_native_t *lock);

// Checks that the memory can be freed: EBUSY if a thread holds the lock or waits for it. Frees the nodes of waiters
// that gave up at a deadline; a lock without such waiters needs no destroy. The lock is free afterwards.
int qspin_native_destroy(struct qspin_native_t *lock);

// Initialises a free lock in memory that no thread uses. EINVAL (of all calls): NULL, or not aligned to 4 bytes.
int qspin_fifo_init(struct qspin_fifo_t *lock);

// Takes the lock; waits without limit.
int qspin_fifo_lock(struct qspin_fifo_t *lock);

// Takes the lock if it is free and no waiter must have it first. Never waits. EBUSY: not taken.
int qspin_fifo_trylock(struct qspin_fifo_t *lock);

// Takes the lock; waits until CLOCK_MONOTONIC shows `deadline_ns` nanoseconds (see qspin_deadline_in). Takes a free
// lock even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_fifo_timedlock(struct qspin_fifo_t *lock,
                         uint64_t deadline_ns);

// As timedlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a time of that clock. EINVAL: another clock, no deadline,
// or nanoseconds of a second or more.
int qspin_fifo_clocklock(struct qspin_fifo_t *lock,
                         int clock,
                         const struct timespec *deadline);

// Releases the lock. EPERM: the lock was free; nothing has changed.
int qspin_fifo_unlock(struct qspin_fifo_t *lock);

// Hands the lock to the oldest waiter, for any type of lock. EPERM: the lock was free; nothing has changed.
int qspin_fifo_unlock_fair(struct qspin_fifo_t *lock);

// Returns 1 if a thread holds the lock at this moment; 0 if not, or if `lock` is NULL or not aligned.
int qspin_fifo_is_locked(const struct qspin_fifo_t *lock);

// Checks that the memory can be freed: EBUSY if a thread holds the lock or waits for it. Frees the nodes of waiters
// that gave up at a deadline; a lock without such waiters needs no destroy. The lock is free afterwards.
int qspin_fifo_destroy(struct qspin_fifo_t *lock);

// Initialises a free lock in memory that no thread uses. EINVAL (of all calls): NULL, or not aligned to 4 bytes.
int qspin_fair_init(struct qspin_fair_t *lock);

// Takes the lock; waits without limit.
int qspin_fair_lock(struct qspin_fair_t *lock);

// Takes the lock if it is free and no waiter must have it first. Never waits. EBUSY: not taken.
int qspin_fair_trylock(struct qspin_fair_t *lock);

// Takes the lock; waits until CLOCK_MONOTONIC shows `deadline_ns` nanoseconds (see qspin_deadline_in). Takes a free
// lock even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_fair_timedlock(struct qspin_fair_t *lock,
                         uint64_t deadline_ns);

// As timedlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a time of that clock. EINVAL: another clock, no deadline,
// or nanoseconds of a second or more.
int qspin_fair_clocklock(struct qspin_fair_t *lock,
                         int clock,
                         const struct timespec *deadline);

// Releases the lock. EPERM: the lock was free; nothing has changed.
int qspin_fair_unlock(struct qspin_fair_t *lock);

// Hands the lock to the oldest waiter, for any type of lock. EPERM: the lock was free; nothing has changed.
int qspin_fair_unlock_fair(struct qspin_fair_t *lock);

// Returns 1 if a thread holds the lock at this moment; 0 if not, or if `lock` is NULL or not aligned.
int qspin_fair_is_locked(const struct qspin_fair_t *lock);

// Checks that the memory can be freed: EBUSY if a thread holds the lock or waits for it. Frees the nodes of waiters
// that gave up at a deadline; a lock without such waiters needs no destroy. The lock is free afterwards.
int qspin_fair_destroy(struct qspin_fair_t *lock);

// Initialises a free lock in memory that no thread uses. EINVAL (of all calls): NULL, or not aligned to 4 bytes.
int qspin_hybrid_init(struct qspin_hybrid_t *lock);

// Takes the lock; waits without limit.
int qspin_hybrid_lock(struct qspin_hybrid_t *lock);

// Takes the lock if it is free and no waiter must have it first. Never waits. EBUSY: not taken.
int qspin_hybrid_trylock(struct qspin_hybrid_t *lock);

// Takes the lock; waits until CLOCK_MONOTONIC shows `deadline_ns` nanoseconds (see qspin_deadline_in). Takes a free
// lock even if the deadline has passed. ETIMEDOUT: not taken.
int qspin_hybrid_timedlock(struct qspin_hybrid_t *lock,
                           uint64_t deadline_ns);

// As timedlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a time of that clock. EINVAL: another clock, no deadline,
// or nanoseconds of a second or more.
int qspin_hybrid_clocklock(struct qspin_hybrid_t *lock,
                           int clock,
                           const struct timespec *deadline);

// Releases the lock. EPERM: the lock was free; nothing has changed.
int qspin_hybrid_unlock(struct qspin_hybrid_t *lock);

// Hands the lock to the oldest waiter, for any type of lock. EPERM: the lock was free; nothing has changed.
int qspin_hybrid_unlock_fair(struct qspin_hybrid_t *lock);

// Returns 1 if a thread holds the lock at this moment; 0 if not, or if `lock` is NULL or not aligned.
int qspin_hybrid_is_locked(const struct qspin_hybrid_t *lock);

// Checks that the memory can be freed: EBUSY if a thread holds the lock or waits for it. Frees the nodes of waiters
// that gave up at a deadline; a lock without such waiters needs no destroy. The lock is free afterwards.
int qspin_hybrid_destroy(struct qspin_hybrid_t *lock);

// Initialises a free lock in memory that no thread uses. EINVAL (of all calls): NULL, or not aligned to 4 bytes.
int qspin_rwlock_init(struct qspin_rwlock_t *lock);

// Takes the lock together with other readers; waits without limit. A thread that has the lock already, for reading or
// writing, must not call it: it may wait for a writer that waits for this thread.
int qspin_rwlock_rdlock(struct qspin_rwlock_t *lock);

// As rdlock, for a thread that may have the lock for reading already: waits for the writer that has the lock, but not
// for writers in the queue.
int qspin_rwlock_rdlock_recursive(struct qspin_rwlock_t *lock);

// Takes the lock alone; waits without limit. A thread that has the lock already must not call it.
int qspin_rwlock_wrlock(struct qspin_rwlock_t *lock);

// Takes the lock together with other readers if no writer has it or must have it first. Never waits. EBUSY: not
// taken.
int qspin_rwlock_tryrdlock(struct qspin_rwlock_t *lock);

// Takes the lock together with other readers if no writer has it. Never waits. EBUSY: not taken.
int qspin_rwlock_tryrdlock_recursive(struct qspin_rwlock_t *lock);

// Takes the lock alone if it is free and no waiter must have it first. Never waits. EBUSY: not taken.
int qspin_rwlock_trywrlock(struct qspin_rwlock_t *lock);

// As qspin_rwlock_rdlock, but waits only until CLOCK_MONOTONIC shows `deadline_ns` nanoseconds (see
// qspin_deadline_in). ETIMEDOUT: not taken.
int qspin_rwlock_timedrdlock(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// As qspin_rwlock_rdlock_recursive, with a deadline as in qspin_rwlock_timedrdlock.
int qspin_rwlock_timedrdlock_recursive(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// As qspin_rwlock_wrlock, with a deadline as in qspin_rwlock_timedrdlock.
int qspin_rwlock_timedwrlock(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// As qspin_rwlock_timedrdlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a time of that clock. EINVAL: another
// clock, no deadline, or nanoseconds of a second or more.
int qspin_rwlock_clockrdlock(struct qspin_rwlock_t *lock,
                             int clock,
                             const struct timespec *deadline);

// As qspin_rwlock_timedrdlock_recursive, with a clock and a deadline as in qspin_rwlock_clockrdlock.
int qspin_rwlock_clockrdlock_recursive(struct qspin_rwlock_t *lock,
                                       int clock,
                                       const struct timespec *deadline);

// As qspin_rwlock_timedwrlock, with a clock and a deadline as in qspin_rwlock_clockrdlock.
int qspin_rwlock_clockwrlock(struct qspin_rwlock_t *lock, int clock, const struct timespec *deadline);

// Ends one reader's access. EPERM: no reader had the lock; nothing has changed.
int qspin_rwlock_rdunlock(struct qspin_rwlock_t *lock);

// Ends the writer's access. EPERM: no writer had the lock; nothing has changed.
int qspin_rwlock_wrunlock(struct qspin_rwlock_t *lock);

// Returns 2 if a writer has the lock at this moment, 1 if readers have it; 0 if it is free, or if `lock` is NULL or
// not aligned.
int qspin_rwlock_is_locked(const struct qspin_rwlock_t *lock);

// Checks that the memory can be freed: EBUSY if a thread has the lock or waits for it. Frees the nodes of waiters
// that gave up at a deadline; a lock without such waiters needs no destroy. The lock is free afterwards.
int qspin_rwlock_destroy(struct qspin_rwlock_t *lock);

// Returns the time that CLOCK_MONOTONIC will show in `timeout_ns` nanoseconds: a deadline for the timedlock calls. If
// the sum does not fit, returns UINT64_MAX, which never comes.
uint64_t qspin_deadline_in(uint64_t timeout_ns);

// Returns the version of the loaded library, in the format of QSPIN_VERSION.
uint32_t qspin_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QSPINLOCK_H */
