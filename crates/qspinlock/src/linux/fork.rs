//! Tells a forked child that the queues it sees are its parent's: the threads in them do not exist in it.
//!
//! A page that the kernel wipes in children (`MADV_WIPEONFORK`, since Linux 4.14) holds a mark. Who finds it gone is
//! in a child, and begins a new epoch. No handlers are registered and nothing is allocated from the heap, so it works
//! in any fork, made by whichever call, also from a signal handler.
//!
//! Not here: what queues do with an epoch (`queue/chain.rs`).

use core::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed},
};

/// The page, once there is one.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
static EPOCH: AtomicU32 = AtomicU32::new(1);

/// The number of forks between the first process and this one, plus one.
pub(super) fn epoch() -> u32 {
    // Acquire pairs with the exchange that published the page.
    let page = PAGE.load(Acquire);
    if page.is_null() {
        map_page();
        return EPOCH.load(Relaxed);
    }
    // SAFETY: the page is never unmapped, is aligned, and holds an AtomicU32 for all threads.
    let mark = unsafe { &*page };
    if mark.load(Acquire) == 0 {
        begin_epoch(mark);
    }
    EPOCH.load(Relaxed)
}

/// The child's first wait: usually there is but one thread. If there are more, one of them counts.
#[cold]
fn begin_epoch(mark: &AtomicU32) {
    const BUSY: u32 = 2;
    match mark.compare_exchange(0, BUSY, Acquire, Acquire) {
        Ok(_) => {
            EPOCH.fetch_add(1, Relaxed);
            // Release pairs with the acquires here and in `epoch`.
            mark.store(1, core::sync::atomic::Ordering::Release);
        }
        Err(_) => {
            while mark.load(Acquire) == BUSY {
                core::hint::spin_loop();
            }
        }
    }
}

#[cold]
#[cfg(not(miri))]
fn map_page() {
    let length = 4096;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new private mapping, where the kernel finds room.
    let page = unsafe { libc::mmap(core::ptr::null_mut(), length, protection, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return; // tried again at the next wait; until then forks go unnoticed
    }
    // SAFETY: the mapping above, of that length.
    unsafe { libc::madvise(page, length, libc::MADV_WIPEONFORK) };
    let page = page.cast::<AtomicU32>();
    // SAFETY: mapped, aligned to a page, and nobody else knows it yet.
    unsafe { (*page).store(1, Relaxed) };
    if PAGE.compare_exchange(core::ptr::null_mut(), page, AcqRel, Relaxed).is_err() {
        // SAFETY: another thread was first; this mapping was shown to nobody.
        unsafe { libc::munmap(page.cast(), length) };
    }
}

/// Miri knows neither forks nor this advice.
#[cfg(miri)]
fn map_page() {}
