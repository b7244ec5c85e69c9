//! Completions: taking them, waiting for them, and waiting for them together with other events.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::time::Duration;

use blk_driver::{Completion, RequestError};

use crate::call::count;
use crate::failure::{Failure, bareblk_code};
use crate::pointers;
use crate::queue::{bareblk_queue, on_queue};

/// How a request ended. Each request ends exactly once. After BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED, exactly
/// one BAREBLK_RETURNED follows; from then on the buffers belong to the program again.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_completion {
    /// The token of the request.
    pub token: u64,
    /// The result: a bareblk_code.
    pub status: i32,
    /// Bytes that the device says it stored, for a read or an id.
    pub stored_bytes: u32,
    /// With BAREBLK_ERR_BAD_STATUS: the status byte. Else 0.
    pub detail: u32,
    /// 0.
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

/// Takes the completions of requests that have ended, `max` at most; never waits. It also ends requests whose deadline
/// has passed, sends the flush after a durable write, and notifies the device of that.
///
/// Returns how many completions it stored; 0: no request has ended. Errors: BAREBLK_ERR_DISCONNECTED and
/// BAREBLK_ERR_DEVICE, after the completions of all requests in flight were taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_completions(
    queue: *mut bareblk_queue,
    completions: *mut bareblk_completion,
    max: usize,
) -> c_int {
    let take = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `max` of them may be written.
        unsafe { queue.take_completions(completions, max, None) }
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, take) }
}

/// As bareblk_completions, but if no request has ended, it sleeps up to `limit_ns` nanoseconds (BAREBLK_FOREVER:
/// without limit). Returns 0 when the time is over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_wait(
    queue: *mut bareblk_queue,
    completions: *mut bareblk_completion,
    max: usize,
    limit_ns: u64,
) -> c_int {
    let limit = Duration::from_nanos(limit_ns);
    let take = |queue: &mut bareblk_queue| {
        // SAFETY: the caller's promise: `max` of them may be written.
        unsafe { queue.take_completions(completions, max, Some(limit)) }
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, take) }
}

/// Most completions per call: the result must be able to count them.
#[allow(clippy::cast_sign_loss)] // it is positive
const MAX_COMPLETIONS: usize = c_int::MAX as usize;

impl bareblk_queue {
    /// Fills `out` in several passes; only the first one waits.
    ///
    /// # Safety
    /// `out` is NULL, or `max` of them may be written.
    unsafe fn take_completions(
        &mut self,
        out: *mut bareblk_completion,
        max: usize,
        mut limit: Option<Duration>,
    ) -> Result<c_int, Failure> {
        // SAFETY: the caller's promise.
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
                // The next call reports it again.
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

/// Asks the device to signal bareblk_completion_fd at the next completion.
///
/// Returns 0: poll the descriptor now; 1: a request has ended already, and there may be no signal for it; or an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_arm(queue: *mut bareblk_queue) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, |queue| Ok(queue.queue.arm()?.into())) }
}

/// Returns the descriptor to poll (or epoll) for reading, after bareblk_arm, or an error. It stays the same as long as
/// the queue exists. It belongs to the queue: do not close it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_completion_fd(queue: *mut bareblk_queue) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, |queue| Ok(queue.queue.completion_fd().as_raw_fd())) }
}

/// Clears the signal of bareblk_completion_fd. Call it after a wake-up and before bareblk_completions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_clear_signal(queue: *mut bareblk_queue) -> c_int {
    let clear = |queue: &mut bareblk_queue| {
        queue.queue.clear_signal();
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, clear) }
}

/// Ends the requests with this token now, with BAREBLK_ERR_CANCELLED. The device does not learn of it, because
/// virtio-blk has no cancellation. The device returns the buffers later, with BAREBLK_RETURNED.
///
/// Errors: BAREBLK_ERR_NOT_FOUND.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_cancel(queue: *mut bareblk_queue, token: u64) -> c_int {
    let cancel = |queue: &mut bareblk_queue| {
        if queue.queue.cancel(token) { Ok(0) } else { Err(Failure::NoSuchToken { token }) }
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, cancel) }
}
