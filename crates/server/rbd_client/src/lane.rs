//! One engine's requests: submitting them, and collecting what librbd's threads have completed.
//!
//! `submit → librbd → its callback: the slot joins a list; the first in an empty list also writes an eventfd → collect`
//!
//! - A slot stays allocated until its callback has run. If the lane is gone by then, the callback frees the slot, and the
//!   image is closed when the last one is.
//! - The buffers are not the lane's: the engine keeps them until it has collected the result.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::completed::{CompletedList, Entry};
use crate::image::Reservation;
use crate::in_flight_bytes::Signal;
use crate::library::{Handle, Library};

/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: the range stays allocated.
const THICK_PROVISION: c_int = 1;

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
    list: Arc<Completed>,
    library: &'static Library,
    /// The request's bytes, until it has completed. Keeps the image open until the lane has collected it.
    reservation: Option<Reservation>,
    user_data: u64,
    len_bytes: u64,
    is_write: bool,
    result: isize,
}

type Completed = CompletedList<Slot, Wake>;

/// Ends the sleep of a lane's worker.
#[derive(Debug)]
struct Wake(OwnedFd);

impl Signal for Wake {
    fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// Submits requests and collects their results. Used by one thread at a time.
#[derive(Debug)]
pub struct Lane {
    completed: Arc<Completed>,
    /// Slots that no request uses. A box, because librbd has the address of a slot in use.
    #[allow(clippy::vec_box)]
    free: Vec<Box<Entry<Slot>>>,
    in_flight: usize,
}

// SAFETY: 1. the links of free slots are not used; 2. everything else in a slot may move between threads.
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
        if self.result < 0
            && let Some(reservation) = &self.reservation
        {
            let image = reservation.image();
            image.look(self.result);
            // As for later requests, which do not reach librbd.
            return if image.is_refused() { -(libc::EIO as isize) } else { self.result };
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
        let completed = Arc::new(Completed::new(Wake(wake)));
        Ok(Self { completed, free: Vec::new(), in_flight: 0 })
    }

    /// Is written, edge by edge, when the list of completed requests stops being empty.
    #[must_use]
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.completed.signal.0.as_fd()
    }

    /// Requests whose results were not collected yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Starts a request at `offset_bytes` of the reservation's image. The reservation is as long as the request's pieces.
    ///
    /// # Errors
    /// librbd has refused the request, which then has no other result.
    ///
    /// # Safety
    /// The array of pieces must stay valid until this returns, and the pieces until the result was collected.
    pub unsafe fn submit(
        &mut self,
        reservation: Reservation,
        user_data: u64,
        offset_bytes: u64,
        request: &Request,
    ) -> io::Result<()> {
        let (library, image) =
            (reservation.image().opened().library(), reservation.image().opened().handle());
        let mut slot = self.free.pop().unwrap_or_else(|| {
            let list = Arc::clone(&self.completed);
            let (reservation, is_write) = (None, false);
            Entry::new(Slot { list, library, reservation, user_data, len_bytes: 0, is_write, result: 0 })
        });
        (slot.value.user_data, slot.value.len_bytes) = (user_data, reservation.len_bytes());
        slot.value.is_write = matches!(request, Request::Write(..));
        slot.value.reservation = Some(reservation);
        let slot = Box::into_raw(slot);
        let mut completion = null_mut();
        // SAFETY: 1. `on_complete` has the callback's type, and the slot lives until it has run.
        let made =
            unsafe { (library.rbd_aio_create_completion)(slot.cast(), on_complete, &raw mut completion) };
        let result = if made < 0 {
            made
        } else {
            // SAFETY: 1. the image is open as long as the slot holds it; 2. the caller guarantees pieces and array.
            unsafe { start(library, image, offset_bytes, completion, request) }
        };
        if result < 0 {
            if made >= 0 {
                // SAFETY: 1. librbd has refused the request, so nothing else uses the completion.
                unsafe { (library.rbd_aio_release)(completion) };
            }
            // SAFETY: 1. the slot came from a box, and the callback will not run.
            let mut slot = unsafe { Box::from_raw(slot) };
            slot.value.reservation = None;
            self.free.push(slot);
            return Err(io::Error::from_raw_os_error(-result));
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Passes `(user_data, result)` of each completed request to `take`: a negated errno, or 0 or a number of bytes.
    #[inline]
    pub fn collect(&mut self, mut take: impl FnMut(u64, isize)) {
        let Self { completed, free, in_flight } = self;
        completed.take(|mut slot| {
            *in_flight -= 1;
            take(slot.value.user_data, slot.value.outcome());
            slot.value.reservation = None;
            free.push(slot);
        });
    }
}

impl Drop for Lane {
    /// Frees the requests that have completed. The callbacks of the others free them.
    fn drop(&mut self) {
        self.completed.close(drop);
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
    // SAFETY: 1. `submit` made the pointer from a box, and gave it to this callback alone.
    let mut slot = unsafe { Box::from_raw(slot.cast::<Entry<Slot>>()) };
    let own = &mut slot.value;
    // SAFETY: 1. the completion is this request's, and nothing uses it after its callback.
    own.result = unsafe { (own.library.rbd_aio_get_return_value)(completion) };
    // SAFETY: as above.
    unsafe { (own.library.rbd_aio_release)(completion) };
    // Here, not when the lane collects: other workers wait for the room.
    own.reservation.iter_mut().for_each(Reservation::release);
    let list = Arc::clone(&own.list);
    if let Some(slot) = list.push(slot) {
        free(*slot);
    }
}

/// Frees a request whose lane is gone. If it was its image's last user, another thread closes the image, because closing
/// waits for this one. If no thread can be started, the image stays open.
#[cold]
fn free(mut slot: Entry<Slot>) {
    let Some(reservation) = slot.value.reservation.take() else { return };
    let image = Arc::clone(reservation.image());
    drop(reservation);
    let Some(image) = Arc::into_inner(image).map(ManuallyDrop::new) else { return };
    let thread = std::thread::Builder::new().name("bareblk-rbd".into());
    let _ = thread.spawn(move || drop(ManuallyDrop::into_inner(image)));
}
