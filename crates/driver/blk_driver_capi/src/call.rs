//! The frame of every call: it catches panics and turns the result into a number.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::Failure;
use crate::pointers;
use crate::queue::bareblk_queue;

/// Makes a number of what `body` does.
#[inline]
pub(crate) fn guarded(body: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    // State that `body` left half done is behind a poisoned lock, or `on_queue` marks it.
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Failure::Panic));
    outcome.unwrap_or_else(|failure| failure.report())
}

/// [`guarded`], for calls on a queue: one that a panic went through takes no more calls.
///
/// # Safety
/// `queue` is NULL, or came from `bareblk_connect`, was not freed, and no other thread uses it during the call.
#[inline]
pub(crate) unsafe fn on_queue(
    queue: *mut bareblk_queue,
    body: impl FnOnce(&mut bareblk_queue) -> Result<c_int, Failure>,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise: it is NULL, or a live handle that no other thread uses now.
        let queue = unsafe { pointers::exclusive(queue, "queue") }?;
        if queue.poisoned {
            return Err(Failure::Poisoned);
        }
        queue.poisoned = true; // unless `body` comes back
        let outcome = body(queue);
        queue.poisoned = false;
        outcome
    })
}

/// A count as a result: what does not fit is not a count that this library makes.
pub(crate) fn count(count: usize) -> c_int {
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blk_driver::{EventFd, PoolOptions, alone};
    use virtqueue::RingFeatures;

    use super::*;
    use crate::failure::bareblk_code;

    #[test]
    fn panic_ends_as_a_code_and_not_in_the_caller() {
        assert_eq!(guarded(|| panic!("on purpose")), bareblk_code::BAREBLK_ERR_BUG as c_int);
    }

    #[test]
    fn queue_that_a_panic_went_through_takes_no_more_calls() {
        let features = RingFeatures { event_idx: false, indirect: false, packed: false };
        let pool = PoolOptions { size_bytes: 4096, huge_pages: false };
        let (queue, _pool, _end) = alone(4, features, pool, Arc::new(EventFd::new().unwrap())).unwrap();
        let mut handle = bareblk_queue::new(queue);

        // SAFETY: it is alive, and no other thread uses it.
        let first = unsafe { on_queue(&raw mut handle, |_| panic!("on purpose")) };
        // SAFETY: as above.
        let second = unsafe { on_queue(&raw mut handle, |_| Ok(0)) };

        let bug = bareblk_code::BAREBLK_ERR_BUG as c_int;
        assert_eq!((first, second), (bug, bug));
    }
}
