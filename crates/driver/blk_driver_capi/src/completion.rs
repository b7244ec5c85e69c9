//! Completions: taking them, waiting for them, and waiting for them together with other events.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::time::Duration;

use blk_driver::{Completion, RequestError};

use crate::call::count;
use crate::failure::{Failure, bareblk_code};
use crate::pointers;
use crate::queue::{bareblk_queue, on_queue};

/// How a request ended. Each request ends exactly once. If it ended with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED,
/// exactly one more completion with BAREBLK_RETURNED follows; from then on, the buffers belong to the program again.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_completion {
    /// The request's token.
    pub token: u64,
    /// The result: a bareblk_code.
    pub status: i32,
    /// For a read or a request for the serial: number of bytes that the device reported as stored.
    pub stored_bytes: u32,
    /// If status is BAREBLK_ERR_BAD_STATUS, the status byte; otherwise 0.
    pub detail: u32,
    /// Always 0.
    pub reserved: u32,
}

impl From<&Completion> for bareblk_completion {
    fn from(completion: &Completion) -> Self {
        let &Completion { token, stored_bytes, result } = completion;
        let detail = match result {
            Err(RequestError::BadStatus { status }) => status.into(),
            _ => 0,
        };
        let status = bareblk_code::of_request(result) as i32;
        Self { token, status, stored_bytes, detail, reserved: 0 }
    }
}

/// Stores in `completions` the completions of up to `max` requests that have ended; never waits. The call also ends
/// requests whose deadline has passed. For a write with BAREBLK_DURABLE, it sends the flush that follows the write, and
/// notifies the device of it.
///
/// Returns the number of completions that it stored; 0 if no request has ended. On failure, returns an error:
/// BAREBLK_ERR_INVALID; on a queue that cannot continue, and only after all its completions were taken,
/// BAREBLK_ERR_DISCONNECTED or BAREBLK_ERR_DEVICE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_completions(
    queue: *mut bareblk_queue,
    completions: *mut bareblk_completion,
    max: usize,
) -> c_int {
    let take = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `max` completions may be written.
        unsafe { queue.take_completions(completions, max, None) }
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, take) }
}

/// Like bareblk_completions, but if no request has ended, the call sleeps until one ends, for up to `limit_ns`
/// nanoseconds (BAREBLK_FOREVER: no limit). Returns 0 if no request ended in time. A signal handler that runs meanwhile
/// does not end the wait. The errors also include BAREBLK_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_wait(
    queue: *mut bareblk_queue,
    completions: *mut bareblk_completion,
    max: usize,
    limit_ns: u64,
) -> c_int {
    let limit = Duration::from_nanos(limit_ns);
    let take = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `max` completions may be written.
        unsafe { queue.take_completions(completions, max, Some(limit)) }
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, take) }
}

/// Maximum number of completions per call: the result must be able to count them.
#[allow(clippy::cast_sign_loss)] // it is positive
const MAX_COMPLETIONS: usize = c_int::MAX as usize;

impl bareblk_queue {
    /// Fills `out` in several passes; only the first one waits.
    ///
    /// # Safety
    /// `out` is NULL, or `max` completions may be written there.
    unsafe fn take_completions(
        &mut self,
        out: *mut bareblk_completion,
        max: usize,
        mut limit: Option<Duration>,
    ) -> Result<c_int, Failure> {
        // SAFETY: the caller upholds the contract of the C header.
        let out = unsafe { pointers::slice_mut(out, max, MAX_COMPLETIONS, "completions") }?;
        let mut stored = 0;
        for pass in out.chunks_mut(self.completions.len()) {
            let kept = &mut self.completions[..pass.len()];
            let taken = match limit.take() {
                Some(limit) => self.queue.wait(kept, limit),
                None => self.queue.completions(kept),
            };
            let taken = match taken {
                Err(error) if stored == 0 => return Err(error.into()),
                // The next call reports the error again.
                Err(_) => break,
                Ok(taken) => taken,
            };
            for (to, from) in pass.iter_mut().zip(&kept[..taken]) {
                *to = from.into();
            }
            stored += taken;
            if taken < pass.len() {
                break;
            }
        }
        Ok(count(stored))
    }
}

/// Asks the device to signal bareblk_completion_fd when the next request ends, and then checks whether one has ended
/// already.
///
/// Returns 0 if none has: poll the descriptor. Returns 1 if bareblk_completions has something to report: call it now,
/// because there may be no signal for it. On failure, returns an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_arm(queue: *mut bareblk_queue) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, |queue| Ok(queue.queue.arm()?.into())) }
}

/// Returns the file descriptor that becomes readable when a request ends, for poll and epoll; or an error:
/// BAREBLK_ERR_INVALID. Call bareblk_arm each time before you wait on the descriptor. It stays the same as long as the
/// queue exists, and belongs to the queue: do not read from it, and do not close it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_completion_fd(queue: *mut bareblk_queue) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, |queue| Ok(queue.queue.completion_fd().as_raw_fd())) }
}

/// Clears the signal on bareblk_completion_fd. Call it after each wake-up, before bareblk_completions; otherwise the
/// descriptor stays readable.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_clear_signal(queue: *mut bareblk_queue) -> c_int {
    let clear = |queue: &mut bareblk_queue| {
        queue.queue.clear_signal();
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, clear) }
}

/// Ends all requests with this token now, with BAREBLK_ERR_CANCELLED. virtio-blk has no cancellation, so the device may
/// still carry them out. When the device no longer uses the buffers of such a request, a completion with
/// BAREBLK_RETURNED follows.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_NOT_FOUND.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_cancel(queue: *mut bareblk_queue, token: u64) -> c_int {
    let cancel = |queue: &mut bareblk_queue| {
        if queue.queue.cancel(token) { Ok(0) } else { Err(Failure::NoSuchToken { token }) }
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, cancel) }
}
