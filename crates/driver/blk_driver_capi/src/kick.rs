//! The two steps of a notification: prepared with the queue, sent without it.
//!
//! A [`Kick`] lies in the caller's memory: a notification allocates nothing, and the caller may send it after it has
//! released a lock, or after the queue's end. Copying the structure moves it, as for any value of Rust.

use std::ffi::c_int;
use std::mem::{MaybeUninit, align_of, size_of};

use blk_driver::Kick;

use crate::call::guarded;
use crate::failure::Failure;
use crate::pointers;
use crate::queue::{bareblk_queue, on_queue};

/// A notification that the device asked for and has not got yet, or nothing. bareblk_prepare_kick creates it, and
/// bareblk_notify ends it, once. A copy of this structure is the same notification: use one of them and forget the
/// other. Any thread may use it, even after its queue or device was freed. Until the program sends it, the device may
/// sleep, and threads that push meanwhile learn that no notification is needed.
#[repr(C)]
#[derive(Debug)]
pub struct bareblk_kick {
    /// Private to this library.
    pub opaque: [usize; 4],
}

/// The content of a [`bareblk_kick`].
#[repr(C)]
struct Kept {
    state: usize,
    /// A value if `state` is [`WANTED`].
    kick: MaybeUninit<Kick>,
}

const _: () = assert!(size_of::<Kept>() <= size_of::<bareblk_kick>());
const _: () = assert!(align_of::<Kept>() == align_of::<bareblk_kick>());

const NOTHING: usize = 0;
/// A number that memory is unlikely to contain by chance.
const WANTED: usize = 0x4b49_434b;

/// First step, under the lock if the queue has one: publishes everything that was pushed to the device.
///
/// Returns 1 and fills in `kick` if the device wants a notification: call bareblk_notify, without the lock. Returns 0
/// if it does not; `kick` is empty then, and bareblk_notify does nothing. Or returns an error; bareblk_notify then
/// does nothing either, unless `kick` was never filled in. The call overwrites a notification that `kick` holds:
/// notify first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_prepare_kick(queue: *mut bareblk_queue, kick: *mut bareblk_kick) -> c_int {
    let prepare = |queue: &mut bareblk_queue| {
        // Empties `kick` before the queue forgets that the device must be notified. SAFETY: the caller's promise: it
        // may be written.
        unsafe { pointers::store(kick, bareblk_kick { opaque: [NOTHING; 4] }, "kick") }?;
        let Some(wanted) = queue.queue.prepare_kick() else { return Ok(0) };
        let kept = Kept { state: WANTED, kick: MaybeUninit::new(wanted) };
        // SAFETY: the caller's promise; large enough and aligned by the assertions above.
        unsafe { pointers::store(kick.cast::<Kept>(), kept, "kick") }?;
        Ok(1)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, prepare) }
}

/// Second step: notifies the device if it wants that, and empties `kick`. Needs no lock; never blocks.
///
/// Errors: BAREBLK_ERR_INVALID: NULL, or a value that bareblk_prepare_kick did not fill in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_notify(kick: *mut bareblk_kick) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        if let Some(kick) = unsafe { take(kick) }? {
            kick.notify();
        }
        Ok(0)
    })
}

/// Both steps in one, for queues without a lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_submit(queue: *mut bareblk_queue) -> c_int {
    let submit = |queue: &mut bareblk_queue| {
        queue.queue.submit();
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_queue(queue, submit) }
}

/// Takes the notification out of `kick`.
///
/// # Safety
/// `kick` is NULL, or holds what `bareblk_prepare_kick` left there or in what it was copied from, and no copy was used.
unsafe fn take(kick: *mut bareblk_kick) -> Result<Option<Kick>, Failure> {
    // SAFETY: the caller's promise: no other thread uses it meanwhile.
    let kept = unsafe { pointers::exclusive(kick.cast::<Kept>(), "kick") }?;
    match std::mem::replace(&mut kept.state, NOTHING) {
        NOTHING => Ok(None),
        WANTED => {
            // SAFETY: the state says that there is one, and is cleared: no call takes it twice.
            Ok(Some(unsafe { kept.kick.assume_init_read() }))
        }
        other => {
            kept.state = other;
            let (value, max) = (other as i128, WANTED as i128);
            Err(Failure::OutOfRange { argument: "state of the kick", value, min: 0, max })
        }
    }
}
