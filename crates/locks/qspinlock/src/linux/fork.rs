//! Lets a forked child detect that a queue is its parent's: the threads in such a queue do not exist in the child.
//!
//! A page that the kernel wipes in children (`MADV_WIPEONFORK`, since Linux 4.14) holds the epoch. A thread
//! that finds the epoch wiped runs in a child, and starts a new epoch. This registers no handlers and
//! allocates nothing from the heap, so it works for any fork, made by any call, even from a signal handler.
//!
//! See also: what queues do with an epoch (`queue/chain.rs`).

use core::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{Acquire, Relaxed},
};

#[cfg(not(miri))]
use super::errno::KeptErrno;

const FIRST: u32 = 1;

/// The page, once it is mapped. It holds this process's epoch.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
/// The latest epoch so far, in this process and the processes that it was forked from.
static LATEST: AtomicU32 = AtomicU32::new(FIRST);

/// The epoch of this process. It grows with each fork between the first process and this one.
pub(super) fn epoch() -> u32 {
    // Acquire pairs with the exchange that published the page.
    let page = PAGE.load(Acquire);
    if page.is_null() {
        map_page();
        return FIRST;
    }
    // SAFETY: the page is never unmapped, is aligned, and holds an AtomicU32 for all threads.
    epoch_in(unsafe { &*page }, &LATEST)
}

fn epoch_in(mark: &AtomicU32, latest: &AtomicU32) -> u32 {
    // Relaxed, here and below: only the number is read.
    match mark.load(Relaxed) {
        0 => begin_epoch(mark, latest),
        epoch => epoch,
    }
}

/// Runs on a child's first wait. Usually the child has only one thread; if several threads, or signal handlers, run
/// this at the same time, one exchange succeeds, and the others do not wait for it.
#[cold]
fn begin_epoch(mark: &AtomicU32, latest: &AtomicU32) -> u32 {
    // Counted first, so that a process forked in between does not reuse this process's epoch as a new one.
    let mine = latest.fetch_add(1, Relaxed) + 1;
    match mark.compare_exchange(0, mine, Relaxed, Relaxed) {
        Ok(_) => mine,
        Err(theirs) => theirs,
    }
}

#[cold]
#[cfg(not(miri))]
fn map_page() {
    let _errno = KeptErrno::new();
    let length = 4096;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new private mapping at an address that the kernel chooses.
    let page = unsafe { libc::mmap(core::ptr::null_mut(), length, protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return; // the next wait tries again; until then forks go undetected
    }
    // SAFETY: the mapping above, of that length.
    unsafe { libc::madvise(page, length, libc::MADV_WIPEONFORK) };
    let page = page.cast::<AtomicU32>();
    // SAFETY: mapped, page-aligned, and no other thread knows it yet.
    unsafe { (*page).store(FIRST, Relaxed) };
    if PAGE
        .compare_exchange(core::ptr::null_mut(), page, core::sync::atomic::Ordering::AcqRel, Relaxed)
        .is_err()
    {
        // SAFETY: another thread was first; this mapping was never published.
        unsafe { libc::munmap(page.cast(), length) };
    }
}

/// Miri supports neither forks nor `MADV_WIPEONFORK`.
#[cfg(miri)]
fn map_page() {}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::vec::Vec;

    use super::*;

    const ROUNDS: u32 = if cfg!(miri) { 20 } else { 100_000 };

    /// Waits until both threads have arrived. Spins, so that they leave together.
    fn meet(arrived: &AtomicU32, so_many: u32) {
        arrived.fetch_add(1, core::sync::atomic::Ordering::AcqRel);
        for look in 0_u32.. {
            if arrived.load(Acquire) >= so_many {
                return;
            }
            if look % 1_000 == 999 {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn threads_that_wait_first_in_a_child_at_the_same_time_begin_one_epoch() {
        let latest = AtomicU32::new(FIRST);
        let pages: Vec<_> = (0..ROUNDS).map(|_| AtomicU32::new(0)).collect();
        let arrived = AtomicU32::new(0);
        let first_waits = || -> Vec<u32> {
            let first_wait = |(page, child): (&AtomicU32, u32)| {
                meet(&arrived, child * 2);
                epoch_in(page, &latest)
            };
            pages.iter().zip(1..).map(first_wait).collect()
        };

        let (ours, theirs) = thread::scope(|scope| {
            let other = scope.spawn(first_waits);
            (first_waits(), other.join().unwrap())
        });

        let apart = ours.iter().zip(&theirs).filter(|(ours, theirs)| ours != theirs).count();
        assert_eq!(apart, 0, "number of children, of {ROUNDS}, whose two threads have different epochs");
        assert!(ours[0] > FIRST && ours.is_sorted_by(|before, after| before < after));
    }
}
