//! One engine's requests: submitting them, and collecting what librbd's threads have completed.
//!
//! `submit → librbd → its callback: the slot joins a list; the first in an empty list also writes an eventfd → collect`
//!
//! - The list is a stack of which the engine takes everything at once, so no element is taken twice.
//! - A slot stays allocated until its callback has run: a lane that is dropped earlier leaks it.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::image::RbdImage;
use crate::library::{Handle, Library};

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: the range stays allocated.
const THICK_PROVISION: c_int = 1;

/// The cluster refuses this client, because another one has broken its lock (`EBLOCKLISTED`).
const BLOCKLISTED: isize = 108;

/// What to do. Pieces are `(first, count)` of an array of buffers.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Reads into the pieces.
    Read(*const libc::iovec, u32),
    /// Writes the pieces, which librbd copies before the call returns.
    Write(*const libc::iovec, u32),
    /// Makes all completed writes durable.
    Flush,
    /// Frees this many bytes.
    Discard(u64),
    /// Zeroes this many bytes.
    WriteZeroes {
        /** The length. */
        len_bytes: u64,
        /** The range stays allocated. */
        keep: bool,
    },
}

/// A request in flight.
struct Slot {
    /// The completed slot below this one in the list.
    next: *mut Slot,
    list: Arc<Completed>,
    library: &'static Library,
    image: Option<Arc<RbdImage>>,
    user_data: u64,
    len_bytes: u64,
    is_write: bool,
    result: isize,
}

/// The completed slots.
#[derive(Debug)]
struct Completed {
    top: AtomicPtr<Slot>,
    wake: OwnedFd,
}

/// Submits requests and collects their results. Used by one thread at a time.
#[derive(Debug)]
pub struct Lane {
    completed: Arc<Completed>,
    /// Slots that no request uses. A box, because librbd has the address of a slot in use.
    #[allow(clippy::vec_box)]
    free: Vec<Box<Slot>>,
    in_flight: usize,
}

// SAFETY: 1. the pointers in free slots are not used, and completed slots are reached only through the atomic list.
unsafe impl Send for Lane {}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("user_data", &self.user_data).finish_non_exhaustive()
    }
}

impl Slot {
    /// The result for the engine.
    #[inline]
    fn outcome(&self) -> isize {
        if self.result == -BLOCKLISTED {
            self.image.iter().for_each(|image| image.note_lock_lost());
            return -(libc::EIO as isize);
        }
        // librbd reports a write that was carried out as 0.
        if self.is_write && self.result == 0 {
            return isize::try_from(self.len_bytes).unwrap_or(isize::MAX);
        }
        self.result
    }
}

impl Lane {
    /// A lane without requests.
    ///
    /// # Errors
    /// No free descriptor.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let completed = Arc::new(Completed { top: AtomicPtr::new(null_mut()), wake });
        Ok(Self { completed, free: Vec::new(), in_flight: 0 })
    }

    /// Is written, edge by edge, when the list of completed requests stops being empty.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.completed.wake.as_fd()
    }

    /// Requests whose results were not collected yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Starts a request at `offset_bytes`. `len_bytes` is the total length of its pieces, for reads and writes.
    ///
    /// # Errors
    /// librbd has refused the request, which then has no other result.
    ///
    /// # Safety
    /// The array of pieces must stay valid until this returns, and the pieces until the result was collected.
    pub unsafe fn submit(
        &mut self,
        image: &Arc<RbdImage>,
        user_data: u64,
        offset_bytes: u64,
        len_bytes: u64,
        request: &Request,
    ) -> io::Result<()> {
        let library = image.library();
        let mut slot = self.free.pop().unwrap_or_else(|| {
            let list = Arc::clone(&self.completed);
            Box::new(Slot {
                next: null_mut(),
                list,
                library,
                image: None,
                user_data: 0,
                len_bytes: 0,
                is_write: false,
                result: 0,
            })
        });
        (slot.user_data, slot.len_bytes) = (user_data, len_bytes);
        slot.is_write = matches!(request, Request::Write(..));
        slot.image = Some(Arc::clone(image));
        image.began(len_bytes);
        let slot = Box::into_raw(slot);
        let mut completion = null_mut();
        // SAFETY: 1. `on_complete` has the callback's type, and the slot lives until it has run.
        let made =
            unsafe { (library.rbd_aio_create_completion)(slot.cast(), on_complete, &raw mut completion) };
        let result = if made < 0 {
            made
        } else {
            // SAFETY: 1. the image is open as long as the slot holds it; 2. the caller guarantees pieces and array.
            unsafe { start(library, image.handle(), offset_bytes, completion, request) }
        };
        if result < 0 {
            if made >= 0 {
                // SAFETY: 1. librbd has refused the request, so nothing else uses the completion.
                unsafe { (library.rbd_aio_release)(completion) };
            }
            // SAFETY: 1. the slot came from a box, and the callback will not run.
            self.recycle(unsafe { Box::from_raw(slot) });
            return Err(io::Error::from_raw_os_error(-result));
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Passes `(user_data, result)` of each completed request to `take`: a negated errno, or 0 or a number of bytes.
    #[inline]
    pub fn collect(&mut self, mut take: impl FnMut(u64, isize)) {
        // Relaxed: a look; the swap below orders the slots' contents.
        if self.completed.top.load(Ordering::Relaxed).is_null() {
            return;
        }
        // Acquire: pairs with the release of the callback that pushed each slot.
        let mut top = self.completed.top.swap(null_mut(), Ordering::Acquire);
        while !top.is_null() {
            // SAFETY: 1. the slot came from a box, its callback has run, and the swap gave it to this thread alone.
            let slot = unsafe { Box::from_raw(top) };
            top = slot.next;
            self.in_flight -= 1;
            take(slot.user_data, slot.outcome());
            self.recycle(slot);
        }
    }

    fn recycle(&mut self, mut slot: Box<Slot>) {
        if let Some(image) = slot.image.take() {
            image.ended(slot.len_bytes);
        }
        self.free.push(slot);
    }
}

impl Drop for Lane {
    /// Frees the requests that have completed. Those in flight are leaked, with their images.
    fn drop(&mut self) {
        self.collect(|_, _| ());
    }
}

/// # Safety
/// As for [`Lane::submit`]; the image must be open.
unsafe fn start(
    library: &Library,
    image: Handle,
    offset_bytes: u64,
    completion: Handle,
    request: &Request,
) -> c_int {
    #[allow(clippy::cast_possible_wrap)] // at most 1024
    match *request {
        // SAFETY: 1. the caller guarantees image, completion, array and pieces. The same holds for the others.
        Request::Read(first, count) => unsafe {
            (library.rbd_aio_readv)(image, first, count as c_int, offset_bytes, completion)
        },
        // SAFETY: as above.
        Request::Write(first, count) => unsafe {
            (library.rbd_aio_writev)(image, first, count as c_int, offset_bytes, completion)
        },
        // SAFETY: as above.
        Request::Flush => unsafe { (library.rbd_aio_flush)(image, completion) },
        // SAFETY: as above.
        Request::Discard(len_bytes) => unsafe {
            (library.rbd_aio_discard)(image, offset_bytes, len_bytes, completion)
        },
        Request::WriteZeroes { len_bytes, keep } => {
            let flags = if keep { THICK_PROVISION } else { 0 };
            let len_bytes = usize::try_from(len_bytes).unwrap_or(usize::MAX);
            // SAFETY: as above.
            unsafe { (library.rbd_aio_write_zeroes)(image, offset_bytes, len_bytes, completion, flags, 0) }
        }
    }
}

/// Called by a thread of librbd.
unsafe extern "C" fn on_complete(completion: Handle, slot: *mut c_void) {
    let slot: *mut Slot = slot.cast();
    let list = {
        // SAFETY: 1. the slot lives until a lane has taken it from the list, and only this callback uses it before.
        let own = unsafe { &mut *slot };
        // SAFETY: 1. the completion is this request's, and nothing uses it after its callback.
        own.result = unsafe { (own.library.rbd_aio_get_return_value)(completion) };
        // SAFETY: as above.
        unsafe { (own.library.rbd_aio_release)(completion) };
        Arc::clone(&own.list)
    };
    let mut top = list.top.load(Ordering::Relaxed);
    loop {
        // SAFETY: 1. the slot is still this callback's.
        unsafe { (*slot).next = top };
        // Release: the lane that takes the slot sees its contents. From here on, the slot is the lane's.
        match list.top.compare_exchange_weak(top, slot, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => top = now,
        }
    }
    if top.is_null() {
        let _ = rustix::io::write(&list.wake, &1_u64.to_ne_bytes());
    }
}
