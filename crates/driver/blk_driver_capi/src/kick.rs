//! The two steps of a notification: preparing it needs the queue, sending it does not.
//!
//! A [`Kick`] is stored in the caller's memory: a notification allocates nothing, and the caller may send it after it
//! has released a lock or freed the queue. Copying the structure moves the [`Kick`], as for any value of Rust.

use std::ffi::c_int;
use std::mem::{MaybeUninit, align_of, size_of};

use blk_driver::Kick;

use crate::call::guarded;
use crate::failure::Failure;
use crate::pointers;
use crate::queue::{bareblk_queue, on_queue};

/// A notification that the device requested and that has not been sent yet, or none. bareblk_prepare_kick fills it in;
/// bareblk_notify sends it and empties it. Zeroed memory is an empty bareblk_kick.
///
/// Any thread may send it, even after the queue and the device were freed. It holds resources until it is sent, so send
/// each notification exactly once: of a structure and its copies, pass only one to bareblk_notify. Send it soon: until
/// then the device may sleep, and bareblk_prepare_kick reports to other threads that the device needs no notification.
#[repr(C)]
#[derive(Debug)]
pub struct bareblk_kick {
    /// Private to this library.
    pub opaque: [usize; 4],
}

/// The content of a [`bareblk_kick`].
#[repr(C)]
struct Content {
    state: usize,
    /// Initialised if `state` is [`WANTED`].
    kick: MaybeUninit<Kick>,
}

const _: () = assert!(size_of::<Content>() <= size_of::<bareblk_kick>());
const _: () = assert!(align_of::<Content>() == align_of::<bareblk_kick>());

const NOTHING: usize = 0;
/// A value that memory is unlikely to contain by chance.
const WANTED: usize = 0x4b49_434b;

/// First step of a submission: makes all pushed requests visible to the device and stores in `kick` whether the device
/// must be notified. If several threads share the queue, call it under their lock, and call bareblk_notify after the
/// unlock. The call overwrites `kick` without reading it: a notification in it that was not sent is lost.
///
/// Returns 1 if the device must be notified: call bareblk_notify. Returns 0 if not; `kick` is empty then, and
/// bareblk_notify has no effect. On failure, returns an error: BAREBLK_ERR_INVALID; `kick` is unchanged or empty then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_prepare_kick(queue: *mut bareblk_queue, kick: *mut bareblk_kick) -> c_int {
    let prepare = |queue: &mut bareblk_queue| {
        // Empties `kick` before the queue forgets that the device must be notified. SAFETY: the caller's promise:
        // `kick` may be written.
        unsafe { pointers::store(kick, bareblk_kick { opaque: [NOTHING; 4] }, "kick") }?;
        let Some(wanted) = queue.queue.prepare_kick() else { return Ok(0) };
        let content = Content { state: WANTED, kick: MaybeUninit::new(wanted) };
        // SAFETY: the caller's promise; large enough and aligned by the assertions above.
        unsafe { pointers::store(kick.cast::<Content>(), content, "kick") }?;
        Ok(1)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, prepare) }
}

/// Second step of a submission: sends the notification in `kick`, if there is one, and empties `kick`. Needs no lock
/// and never blocks.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, for NULL and for a value that bareblk_prepare_kick did not store.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_notify(kick: *mut bareblk_kick) -> c_int {
    guarded(|| {
        // SAFETY: the caller upholds the contract of the C header.
        if let Some(kick) = unsafe { take(kick) }? {
            kick.notify();
        }
        Ok(0)
    })
}

/// Does both steps of a submission, bareblk_prepare_kick and bareblk_notify, for queues that are used without a lock.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_submit(queue: *mut bareblk_queue) -> c_int {
    let submit = |queue: &mut bareblk_queue| {
        queue.queue.submit();
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_queue(queue, submit) }
}

/// Takes the notification out of `kick`.
///
/// # Safety
/// `kick` is NULL, or holds what `bareblk_prepare_kick` stored in it or in the structure that it was copied from, and
/// no copy was used.
unsafe fn take(kick: *mut bareblk_kick) -> Result<Option<Kick>, Failure> {
    // SAFETY: the caller's promise: no other thread uses `kick` meanwhile.
    let content = unsafe { pointers::exclusive(kick.cast::<Content>(), "kick") }?;
    match std::mem::replace(&mut content.state, NOTHING) {
        NOTHING => Ok(None),
        WANTED => {
            // SAFETY: the state said that there is a `Kick`, and has been cleared, so that no call takes the `Kick`
            // twice.
            Ok(Some(unsafe { content.kick.assume_init_read() }))
        }
        other => {
            content.state = other;
            let (value, max) = (other as i128, WANTED as i128);
            Err(Failure::OutOfRange { argument: "state of the kick", value, min: 0, max })
        }
    }
}
