/*
 * qspinlock.h: queued spin locks for user space, whose waiters can sleep. A lock has 4 bytes, a reader-writer lock 8.
 *
 * Generated from the sources in crates/locks/qspinlock_capi: edit those. docs/how-to/qspinlock-c.md has an example.
 *
 *     qspin_native_t   waiters get the lock first in, first out; they only spin: for threads that have a core each
 *     qspin_fifo_t     waiters get the lock first in, first out; they spin for a while, then sleep
 *     qspin_fair_t     like fifo, but a bounded number of newcomers may use the lock while the next waiter wakes up
 *     qspin_hybrid_t   as fast as an unfair lock: newcomers may pass the waiters a bounded number of times in a row
 *     qspin_rwlock_t   many readers or one writer, in the order of qspin_fair_t
 *
 * A newcomer is a thread that tries to lock while other threads wait in the lock's queue.
 *
 * Return values. Like pthread_spin_* and pthread_mutex_*: 0, or a positive error number of <errno.h>. EINVAL means that
 * `lock` is NULL or not aligned to 4 bytes, or what the function's description says. Functions leave errno unchanged,
 * do not allocate memory, do not end the program, and throw no C++ exceptions.
 *
 * Lifetime. Zeroed memory is an unlocked lock, and so is a variable with the initialiser QSPIN_..._INIT. The caller
 * owns the lock's memory. Only a lock on which a waiter gave up at a deadline needs destroy. Do not move, copy or free
 * a lock while threads use it.
 *
 * Threads. Any thread may unlock, not only the one that locked. A thread that locks a lock that it already holds waits
 * forever. All threads must belong to one process: do not put locks into memory that processes share.
 *
 * Signals. A signal handler may lock a lock that the interrupted thread neither holds nor waits for. It must not wait
 * for a lock whose holder waits for a lock that the interrupted thread holds or waits for. trylock, unlock and
 * is_locked never wait.
 *
 * Cancellation. No function is a cancellation point. Do not cancel a thread asynchronously while it waits for a lock:
 * the waiters behind it would wait forever.
 *
 * Fork. In the child, the only thread holds the locks that the forking thread held; parent and child unlock their own
 * copies. A lock that another thread held stays locked in the child forever. Waiters exist only in the parent. A
 * reader-writer lock that had waiters cannot be used in the child.
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
#define QSPIN_VERSION 512

// A lock that waiters get first in, first out. They only spin: for threads that have a core each.
typedef struct qspin_native_t {
    // Private to this library.
    uint32_t opaque;
} qspin_native_t;

// A lock that waiters get strictly first in, first out. It stays idle while the next waiter wakes up.
typedef struct qspin_fifo_t {
    // Private to this library.
    uint32_t opaque;
} qspin_fifo_t;

// A lock that waiters get first in, first out. Newcomers may use it while the next waiter wakes up.
typedef struct qspin_fair_t {
    // Private to this library.
    uint32_t opaque;
} qspin_fair_t;

// A lock that newcomers may take before the waiters, a bounded number of times in a row.
typedef struct qspin_hybrid_t {
    // Private to this library.
    uint32_t opaque;
} qspin_hybrid_t;

// A lock for many readers or one writer. Readers and writers wait in one queue, first in, first out. They spin, then
// sleep.
typedef struct qspin_rwlock_t {
    // Private to this library.
    uint32_t opaque[2];
} qspin_rwlock_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Initialises `lock` as unlocked. No other thread may use the memory during the call.
//
// Returns 0 or EINVAL.
int qspin_native_init(struct qspin_native_t *lock);

// Locks `lock`; waits without a time limit.
//
// Returns 0 or EINVAL.
int qspin_native_lock(struct qspin_native_t *lock);

// Locks `lock` if it is free and is not reserved for a waiter. Never waits.
//
// Returns 0, EBUSY (not locked) or EINVAL.
int qspin_native_trylock(struct qspin_native_t *lock);

// Locks `lock`; waits until CLOCK_MONOTONIC reaches `deadline_ns`, in nanoseconds (see qspin_deadline_in). Locks a
// free lock even if the deadline has passed.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL.
int qspin_native_timedlock(struct qspin_native_t *lock,
                           uint64_t deadline_ns);

// Like timedlock, but waits until the clock `clock` (CLOCK_MONOTONIC or CLOCK_REALTIME) reaches the absolute time
// `deadline`.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
// or its tv_nsec is not from 0 to 999999999.
int qspin_native_clocklock(struct qspin_native_t *lock,
                           int clock,
                           const struct timespec *deadline);

// Unlocks `lock`. Any thread may call this function, not only the one that locked the lock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_native_unlock(struct qspin_native_t *lock);

// Unlocks `lock` and hands it to the thread that has waited longest, whatever the type of the lock. Without waiters,
// this is the same as unlock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_native_unlock_fair(struct qspin_native_t *lock);

// Returns 1 if a thread holds the lock, and 0 if not. The result may be outdated when the call returns. Returns 0 if
// `lock` is NULL or not aligned.
int qspin_native_is_locked(const struct qspin_native_t *lock);

// Checks that no thread holds the lock or waits for it, and frees the queue nodes of waiters that gave up at a
// deadline. The lock is free afterwards: its memory may be freed, or the lock used again. Only a lock on which a
// waiter gave up needs this call.
//
// Returns 0, EBUSY (a thread holds the lock or waits for it) or EINVAL.
int qspin_native_destroy(struct qspin_native_t *lock);

// Initialises `lock` as unlocked. No other thread may use the memory during the call.
//
// Returns 0 or EINVAL.
int qspin_fifo_init(struct qspin_fifo_t *lock);

// Locks `lock`; waits without a time limit.
//
// Returns 0 or EINVAL.
int qspin_fifo_lock(struct qspin_fifo_t *lock);

// Locks `lock` if it is free and is not reserved for a waiter. Never waits.
//
// Returns 0, EBUSY (not locked) or EINVAL.
int qspin_fifo_trylock(struct qspin_fifo_t *lock);

// Locks `lock`; waits until CLOCK_MONOTONIC reaches `deadline_ns`, in nanoseconds (see qspin_deadline_in). Locks a
// free lock even if the deadline has passed.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL.
int qspin_fifo_timedlock(struct qspin_fifo_t *lock,
                         uint64_t deadline_ns);

// Like timedlock, but waits until the clock `clock` (CLOCK_MONOTONIC or CLOCK_REALTIME) reaches the absolute time
// `deadline`.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
// or its tv_nsec is not from 0 to 999999999.
int qspin_fifo_clocklock(struct qspin_fifo_t *lock,
                         int clock,
                         const struct timespec *deadline);

// Unlocks `lock`. Any thread may call this function, not only the one that locked the lock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_fifo_unlock(struct qspin_fifo_t *lock);

// Unlocks `lock` and hands it to the thread that has waited longest, whatever the type of the lock. Without waiters,
// this is the same as unlock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_fifo_unlock_fair(struct qspin_fifo_t *lock);

// Returns 1 if a thread holds the lock, and 0 if not. The result may be outdated when the call returns. Returns 0 if
// `lock` is NULL or not aligned.
int qspin_fifo_is_locked(const struct qspin_fifo_t *lock);

// Checks that no thread holds the lock or waits for it, and frees the queue nodes of waiters that gave up at a
// deadline. The lock is free afterwards: its memory may be freed, or the lock used again. Only a lock on which a
// waiter gave up needs this call.
//
// Returns 0, EBUSY (a thread holds the lock or waits for it) or EINVAL.
int qspin_fifo_destroy(struct qspin_fifo_t *lock);

// Initialises `lock` as unlocked. No other thread may use the memory during the call.
//
// Returns 0 or EINVAL.
int qspin_fair_init(struct qspin_fair_t *lock);

// Locks `lock`; waits without a time limit.
//
// Returns 0 or EINVAL.
int qspin_fair_lock(struct qspin_fair_t *lock);

// Locks `lock` if it is free and is not reserved for a waiter. Never waits.
//
// Returns 0, EBUSY (not locked) or EINVAL.
int qspin_fair_trylock(struct qspin_fair_t *lock);

// Locks `lock`; waits until CLOCK_MONOTONIC reaches `deadline_ns`, in nanoseconds (see qspin_deadline_in). Locks a
// free lock even if the deadline has passed.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL.
int qspin_fair_timedlock(struct qspin_fair_t *lock,
                         uint64_t deadline_ns);

// Like timedlock, but waits until the clock `clock` (CLOCK_MONOTONIC or CLOCK_REALTIME) reaches the absolute time
// `deadline`.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
// or its tv_nsec is not from 0 to 999999999.
int qspin_fair_clocklock(struct qspin_fair_t *lock,
                         int clock,
                         const struct timespec *deadline);

// Unlocks `lock`. Any thread may call this function, not only the one that locked the lock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_fair_unlock(struct qspin_fair_t *lock);

// Unlocks `lock` and hands it to the thread that has waited longest, whatever the type of the lock. Without waiters,
// this is the same as unlock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_fair_unlock_fair(struct qspin_fair_t *lock);

// Returns 1 if a thread holds the lock, and 0 if not. The result may be outdated when the call returns. Returns 0 if
// `lock` is NULL or not aligned.
int qspin_fair_is_locked(const struct qspin_fair_t *lock);

// Checks that no thread holds the lock or waits for it, and frees the queue nodes of waiters that gave up at a
// deadline. The lock is free afterwards: its memory may be freed, or the lock used again. Only a lock on which a
// waiter gave up needs this call.
//
// Returns 0, EBUSY (a thread holds the lock or waits for it) or EINVAL.
int qspin_fair_destroy(struct qspin_fair_t *lock);

// Initialises `lock` as unlocked. No other thread may use the memory during the call.
//
// Returns 0 or EINVAL.
int qspin_hybrid_init(struct qspin_hybrid_t *lock);

// Locks `lock`; waits without a time limit.
//
// Returns 0 or EINVAL.
int qspin_hybrid_lock(struct qspin_hybrid_t *lock);

// Locks `lock` if it is free and is not reserved for a waiter. Never waits.
//
// Returns 0, EBUSY (not locked) or EINVAL.
int qspin_hybrid_trylock(struct qspin_hybrid_t *lock);

// Locks `lock`; waits until CLOCK_MONOTONIC reaches `deadline_ns`, in nanoseconds (see qspin_deadline_in). Locks a
// free lock even if the deadline has passed.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL.
int qspin_hybrid_timedlock(struct qspin_hybrid_t *lock,
                           uint64_t deadline_ns);

// Like timedlock, but waits until the clock `clock` (CLOCK_MONOTONIC or CLOCK_REALTIME) reaches the absolute time
// `deadline`.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
// or its tv_nsec is not from 0 to 999999999.
int qspin_hybrid_clocklock(struct qspin_hybrid_t *lock,
                           int clock,
                           const struct timespec *deadline);

// Unlocks `lock`. Any thread may call this function, not only the one that locked the lock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_hybrid_unlock(struct qspin_hybrid_t *lock);

// Unlocks `lock` and hands it to the thread that has waited longest, whatever the type of the lock. Without waiters,
// this is the same as unlock.
//
// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
int qspin_hybrid_unlock_fair(struct qspin_hybrid_t *lock);

// Returns 1 if a thread holds the lock, and 0 if not. The result may be outdated when the call returns. Returns 0 if
// `lock` is NULL or not aligned.
int qspin_hybrid_is_locked(const struct qspin_hybrid_t *lock);

// Checks that no thread holds the lock or waits for it, and frees the queue nodes of waiters that gave up at a
// deadline. The lock is free afterwards: its memory may be freed, or the lock used again. Only a lock on which a
// waiter gave up needs this call.
//
// Returns 0, EBUSY (a thread holds the lock or waits for it) or EINVAL.
int qspin_hybrid_destroy(struct qspin_hybrid_t *lock);

// Initialises `lock` as unlocked. No other thread may use the memory during the call.
//
// Returns 0 or EINVAL.
int qspin_rwlock_init(struct qspin_rwlock_t *lock);

// Locks `lock` for reading, together with other readers; waits without a time limit. A thread that already holds the
// lock, for reading or for writing, must not call this function: it could wait for a writer that waits for this
// thread.
//
// Returns 0 or EINVAL.
int qspin_rwlock_rdlock(struct qspin_rwlock_t *lock);

// Like qspin_rwlock_rdlock, for a thread that may already hold the lock for reading: waits for a writer that holds the
// lock, but not for writers in the queue. Each successful call needs its own qspin_rwlock_rdunlock.
//
// Returns 0 or EINVAL.
int qspin_rwlock_rdlock_recursive(struct qspin_rwlock_t *lock);

// Locks `lock` exclusively, for writing; waits without a time limit. A thread that already holds the lock must not
// call this function.
//
// Returns 0 or EINVAL.
int qspin_rwlock_wrlock(struct qspin_rwlock_t *lock);

// Locks `lock` for reading, unless a writer holds it or it is reserved for a waiter. Never waits.
//
// Returns 0, EBUSY (not locked) or EINVAL.
int qspin_rwlock_tryrdlock(struct qspin_rwlock_t *lock);

// Locks `lock` for reading, unless a writer holds it. Never waits.
//
// Returns 0, EBUSY (not locked) or EINVAL.
int qspin_rwlock_tryrdlock_recursive(struct qspin_rwlock_t *lock);

// Locks `lock` for writing if it is free and is not reserved for a waiter. Never waits.
//
// Returns 0, EBUSY (not locked) or EINVAL.
int qspin_rwlock_trywrlock(struct qspin_rwlock_t *lock);

// Like qspin_rwlock_rdlock, but waits only until CLOCK_MONOTONIC reaches `deadline_ns`, in nanoseconds (see
// qspin_deadline_in).
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL.
int qspin_rwlock_timedrdlock(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// Like qspin_rwlock_rdlock_recursive, with a deadline as in qspin_rwlock_timedrdlock.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL.
int qspin_rwlock_timedrdlock_recursive(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// Like qspin_rwlock_wrlock, with a deadline as in qspin_rwlock_timedrdlock.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL.
int qspin_rwlock_timedwrlock(struct qspin_rwlock_t *lock, uint64_t deadline_ns);

// Like qspin_rwlock_timedrdlock, but waits until the clock `clock` (CLOCK_MONOTONIC or CLOCK_REALTIME) reaches the
// absolute time `deadline`.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
// or its tv_nsec is not from 0 to 999999999.
int qspin_rwlock_clockrdlock(struct qspin_rwlock_t *lock,
                             int clock,
                             const struct timespec *deadline);

// Like qspin_rwlock_timedrdlock_recursive, with a clock and a deadline as in qspin_rwlock_clockrdlock.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
// or its tv_nsec is not from 0 to 999999999.
int qspin_rwlock_clockrdlock_recursive(struct qspin_rwlock_t *lock,
                                       int clock,
                                       const struct timespec *deadline);

// Like qspin_rwlock_timedwrlock, with a clock and a deadline as in qspin_rwlock_clockrdlock.
//
// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
// or its tv_nsec is not from 0 to 999999999.
int qspin_rwlock_clockwrlock(struct qspin_rwlock_t *lock,
                             int clock,
                             const struct timespec *deadline);

// Unlocks `lock` for one reader.
//
// Returns 0, EPERM (no reader held the lock; nothing has changed) or EINVAL.
int qspin_rwlock_rdunlock(struct qspin_rwlock_t *lock);

// Unlocks `lock` for the writer.
//
// Returns 0, EPERM (no writer held the lock; nothing has changed) or EINVAL.
int qspin_rwlock_wrunlock(struct qspin_rwlock_t *lock);

// Returns 2 if a writer holds the lock, 1 if readers hold it, and 0 if it is free. The result may be outdated when the
// call returns. Returns 0 if `lock` is NULL or not aligned.
int qspin_rwlock_is_locked(const struct qspin_rwlock_t *lock);

// Checks that no thread holds the lock or waits for it, and frees the queue nodes of waiters that gave up at a
// deadline. The lock is free afterwards: its memory may be freed, or the lock used again. Only a lock on which a
// waiter gave up needs this call.
//
// Returns 0, EBUSY (a thread holds the lock or waits for it) or EINVAL.
int qspin_rwlock_destroy(struct qspin_rwlock_t *lock);

// Returns the value that CLOCK_MONOTONIC will have in `timeout_ns` nanoseconds, in nanoseconds: a deadline for the
// timedlock functions. Returns UINT64_MAX, a deadline that never comes, if the sum is too large.
uint64_t qspin_deadline_in(uint64_t timeout_ns);

// Returns the version of the library that the program runs with, in the format of QSPIN_VERSION.
uint32_t qspin_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QSPINLOCK_H */
