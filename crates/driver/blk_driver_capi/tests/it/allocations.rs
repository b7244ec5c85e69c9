//! A warm queue does not allocate: requests are pushed, submitted in two steps, awaited; nor does a full queue.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bareblk_driver::*;

use crate::connected::{Connected, limit_ns};
use crate::server::Disk;

/// Counts each thread's allocations.
struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's, unchanged; the counter needs no memory of the heap.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Fills the queue with reads of two buffers each, tries one more, and waits until all have ended.
fn round(connected: &Connected, addr: u64) -> u64 {
    let none = bareblk_completion { token: 0, status: 0, stored_bytes: 0, detail: 0, reserved: 0 };
    let mut out = [none; 64];
    let buffers =
        [bareblk_range { addr, len_bytes: 512 }, bareblk_range { addr: addr + 512, len_bytes: 512 }];
    let mut pushed = 0;
    // SAFETY: the queue is alive, and this thread's, here and below; so are the buffers.
    while unsafe { bareblk_push_read(connected.queue, 0, buffers.as_ptr(), 2, pushed, limit_ns()) } == 0 {
        pushed += 1;
    }
    let mut kick = bareblk_kick { opaque: [0; 4] };
    // SAFETY: as above.
    assert!(unsafe { bareblk_prepare_kick(connected.queue, &raw mut kick) } >= 0);
    // SAFETY: this is its only copy.
    assert_eq!(unsafe { bareblk_notify(&raw mut kick) }, 0);
    let mut left = pushed;
    while left > 0 {
        // SAFETY: as above; there is room for as many.
        let taken = unsafe { bareblk_wait(connected.queue, out.as_mut_ptr(), out.len(), limit_ns()) };
        assert!(taken > 0);
        left -= u64::try_from(taken).unwrap();
    }
    pushed
}

#[test]
fn warm_queue_allocates_nothing() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let mut buffer = std::ptr::null_mut();
    // SAFETY: the device is alive.
    assert_eq!(unsafe { bareblk_buffer_take(connected.device, 4096, &raw mut buffer) }, 0);
    // SAFETY: the buffer is alive.
    let addr = unsafe { bareblk_buffer_addr(buffer) };
    round(&connected, addr);
    let before = COUNT.get();
    assert!(before > 0, "nothing is counted");

    let pushed: u64 = (0..8).map(|_| round(&connected, addr)).sum();

    assert_eq!((COUNT.get() - before, pushed), (0, 8 * 256));
    // SAFETY: all of its requests have ended.
    unsafe { bareblk_buffer_release(buffer) };
}
