//! The handle of a queue: its properties and settings, and freeing it.

use std::ffi::c_int;
use std::mem::size_of;
use std::time::Instant;

use blk_driver::{Completion, Queue, ShortReads};
use guest_mem::GuestRange;
use virtio_blk::Segment;

use crate::call::{count, guarded};
use crate::failure::Failure;
use crate::options::{BAREBLK_FOREVER, nanoseconds};
use crate::pointers::{self, Plain};

/// A queue of a device. Only one thread at a time may use it. It stays valid after bareblk_disconnect: requests in
/// flight end with BAREBLK_ERR_LOST, and the program can still take their completions. Freed by bareblk_queue_free.
#[derive(Debug)]
pub struct bareblk_queue {
    pub(crate) queue: Queue,
    /// Set while a call on the queue runs; stays set if the call panics.
    pub(crate) poisoned: bool,
    /// A list of buffers that every request reuses, so that no request allocates.
    pub(crate) ranges: Vec<GuestRange>,
    /// A list of segments that every request reuses.
    pub(crate) segments: Vec<Segment>,
    /// A list of completions that every call reuses; never empty.
    pub(crate) completions: Vec<Completion>,
}

/// Completions per pass; one call may need several passes.
const PASS: usize = 256;

impl bareblk_queue {
    pub(crate) fn new(queue: Queue) -> Self {
        let completions = vec![Completion::default(); PASS];
        Self { queue, poisoned: false, ranges: Vec::new(), segments: Vec::new(), completions }
    }
}

/// [`guarded`], for calls on a queue. After a panic in a call, the queue refuses all later calls.
///
/// # Safety
/// `queue` is NULL, or it came from `bareblk_connect`, was not freed, and no other thread uses it during the call.
#[inline]
pub(crate) unsafe fn on_queue(
    queue: *mut bareblk_queue,
    body: impl FnOnce(&mut bareblk_queue) -> Result<c_int, Failure>,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise: `queue` is NULL, or a live handle that no other thread uses now.
        let queue = unsafe { pointers::exclusive(queue, "queue") }?;
        if queue.poisoned {
            return Err(Failure::Poisoned);
        }
        queue.poisoned = true; // stays true if `body` panics
        let outcome = body(queue);
        queue.poisoned = false;
        outcome
    })
}

/// Returns the queue's index on the device, counted from 0; or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_index(queue: *mut bareblk_queue) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, |queue| Ok(queue.queue.index().into())) }
}

/// Returns the queue's size in descriptors; or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_size(queue: *mut bareblk_queue) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, |queue| Ok(queue.queue.queue_size().into())) }
}

/// Returns the number of requests in flight: those that the queue accepted and whose completion was not taken yet, and
/// those that ended with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED and have no BAREBLK_RETURNED yet. On failure,
/// returns an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_in_flight(queue: *mut bareblk_queue) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, |queue| Ok(count(queue.queue.in_flight()))) }
}

/// Returns how many requests with `buffers` buffers each the queue accepts now; or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_room(queue: *mut bareblk_queue, buffers: u16) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, |queue| Ok(count(queue.queue.room(buffers.into())))) }
}

/// Sets how a read ends if the device reports success although it stored fewer bytes than requested. If `refuse` is 0,
/// the read ends with BAREBLK_OK; this is the default, because some devices do not report how much they stored. With
/// any other value, it ends with BAREBLK_ERR_SHORT_READ. In both cases, bareblk_completion.stored_bytes has the number
/// of bytes that the device reported.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_refuse_short_reads(queue: *mut bareblk_queue, refuse: c_int) -> c_int {
    let policy = if refuse == 0 { ShortReads::Trust } else { ShortReads::Refuse };
    let set = |queue: &mut bareblk_queue| {
        queue.queue.set_short_reads(policy);
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, set) }
}

/// Stores in `left_ns` the time until the earliest deadline of the requests in flight, in nanoseconds: 0 if the
/// deadline has passed, BAREBLK_FOREVER if no request has one. For programs that wait on bareblk_completion_fd: a
/// request ends at its deadline only in a call of bareblk_completions or bareblk_wait, so wake up in time to make that
/// call. The earliest deadline may be that of a request that has just ended.
///
/// Returns 1 if there is a deadline; 0 if there is none; or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_next_deadline(queue: *mut bareblk_queue, left_ns: *mut u64) -> c_int {
    let ask = |queue: &mut bareblk_queue| {
        let left = queue.queue.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
        let known = left.map_or(BAREBLK_FOREVER, nanoseconds);
        // SAFETY: the caller upholds the contract of the C header.
        unsafe { pointers::store(left_ns, known, "left_ns") }?;
        Ok(left.is_some().into())
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, ask) }
}

/// Counters of a queue since bareblk_connect. Later versions of this library may add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_stats {
    /// Number of requests that the queue accepted.
    pub pushed: u64,
    /// Number of requests that ended.
    pub completed: u64,
    /// Number of notifications that the device requested.
    pub kicks: u64,
    /// Number of batches of requests that were made visible to the device.
    pub publications: u64,
    /// How often a call slept to wait for a completion.
    pub sleeps: u64,
}

// SAFETY: integers of one size: no padding.
unsafe impl Plain for bareblk_stats {}

/// Stores the queue's counters in `stats`. `struct_size`: sizeof (bareblk_stats).
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_stats(
    queue: *mut bareblk_queue,
    stats: *mut bareblk_stats,
    struct_size: usize,
) -> c_int {
    let ask = |queue: &mut bareblk_queue| {
        let counted = queue.queue.stats();
        let known = bareblk_stats {
            pushed: counted.pushed,
            completed: counted.completed,
            kicks: counted.kicks,
            publications: counted.publications,
            sleeps: counted.sleeps,
        };
        // SAFETY: the caller upholds the contract of the C header.
        unsafe { pointers::store_sized(stats, struct_size, size_of::<u64>(), &known, "stats") }?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, ask) }
}

/// Frees the queue's handle. NULL has no effect. Requests in flight get no completion, and the device may use their
/// buffers until bareblk_disconnect has returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_queue_free(queue: *mut bareblk_queue) {
    if queue.is_null() {
        return;
    }
    guarded(|| {
        // SAFETY: 1. not NULL, hence from `Box::into_raw` in `bareblk_connect`; 2. freed once, by the caller's promise.
        drop(unsafe { Box::from_raw(queue) });
        Ok(0)
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blk_driver::{EventFd, PoolOptions, alone};
    use virtqueue::RingFeatures;

    use super::*;
    use crate::failure::bareblk_code;

    #[test]
    fn queue_that_a_panic_went_through_takes_no_more_calls() {
        let features = RingFeatures { event_idx: false, indirect: false, packed: false };
        let pool = PoolOptions { size_bytes: 4096, huge_pages: false };
        let (queue, _pool, _end) = alone(4, features, pool, Arc::new(EventFd::new().unwrap())).unwrap();
        let mut handle = bareblk_queue::new(queue);

        // SAFETY: the handle is alive, and no other thread uses it.
        let first = unsafe { on_queue(&raw mut handle, |_| panic!("on purpose")) };
        // SAFETY: as above.
        let second = unsafe { on_queue(&raw mut handle, |_| Ok(0)) };

        let bug = bareblk_code::BAREBLK_ERR_BUG as c_int;
        assert_eq!((first, second), (bug, bug));
    }
}
