//! One open image, which all workers of its disk share: its size, its durability, and the bytes in flight.
//!
//! - Two handles on one image would take the exclusive lock from each other, even in one process. So there is one.
//! - Opening does not take the lock: a disk takes it while a guest uses the image.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::RbdError;
use crate::in_flight_bytes::{InFlightBytes, Signal};
use crate::lock::{Answer, Lock, check_has_lock};
use crate::lock_check;
use crate::open_image::{OpenImage, OpenOptions};
use crate::spec::RbdSpec;

/// librbd's answer to a write without the lock (`EROFS`).
const READ_ONLY: isize = 30;

/// Room for one request's bytes, until it is dropped. Keeps the image open.
#[derive(Debug)]
pub struct Reservation {
    image: Arc<RbdImage>,
    len_bytes: u64,
}

/// Wakes all workers that watch the descriptor.
#[derive(Debug)]
struct RoomSignal(OwnedFd);

/// An open image.
#[derive(Debug)]
pub struct RbdImage {
    opened: OpenImage,
    in_flight: InFlightBytes<RoomSignal>,
    /// `None`: the image is used without its lock.
    lock: Option<Lock>,
}

impl RbdImage {
    /// Opens the image. Blocks for seconds if the cluster does not answer.
    ///
    /// # Errors
    /// [`RbdError`].
    pub fn open(spec: &RbdSpec, options: &OpenOptions) -> Result<Arc<Self>, RbdError> {
        let no_eventfd = |errno: rustix::io::Errno| RbdError::Other {
            image: spec.to_string(),
            action: "make an eventfd for it",
            source: errno.into(),
        };
        let room_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(no_eventfd)?;
        let opened = OpenImage::open(spec, options)?;
        let is_locked = options.lock && !options.read_only;
        if is_locked {
            check_has_lock(&opened)?;
        }
        let lock = is_locked.then(|| Lock::new(options.lock_timeout));
        Ok(Arc::new(Self { opened, in_flight: InFlightBytes::new(RoomSignal(room_fd)), lock }))
    }

    /// Runs `call`, which uses this image and may block, on a new thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start_thread(&self, call: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        self.opened.start_thread(call)
    }

    /// The image's name.
    #[must_use]
    pub fn spec(&self) -> &RbdSpec {
        self.opened.spec()
    }

    /// Takes the lock, unless the image is used without it. Each call needs a [`RbdImage::release_lock`]. Blocks while the cluster does not
    /// answer, and for the lock's time limit while another client has the lock and `is_wanted`.
    ///
    /// # Errors
    /// [`RbdError::Locked`], or librbd's error.
    pub fn take_lock(self: &Arc<Self>, is_wanted: &dyn Fn() -> bool) -> Result<(), RbdError> {
        let Some(lock) = &self.lock else { return Ok(()) };
        if lock.take(&self.opened, is_wanted)?
            && let Err(error) = self.start_lock_check()
        {
            tracing::warn!(image = %self.spec(), "no thread can ask whether the image's lock is kept: {error}");
        }
        Ok(())
    }

    /// The thread keeps the image open only while it asks the cluster.
    fn start_lock_check(self: &Arc<Self>) -> io::Result<()> {
        let own = Arc::downgrade(self);
        let ask =
            move |image: &Self| image.lock.as_ref().map_or(Answer::Released, |lock| lock.ask(&image.opened));
        self.start_thread(Box::new(move || {
            if lock_check::is_lost(|| own.upgrade().map_or(Answer::Released, |image| ask(&image))) {
                own.upgrade().inspect(|image| image.opened.note_lock_lost());
            }
        }))
    }

    /// Releases the lock once it was released as often as it was taken. To be called when all writes are durable. Blocks
    /// until the cluster has answered.
    ///
    /// # Errors
    /// librbd's.
    pub fn release_lock(&self) -> io::Result<()> {
        self.lock.as_ref().map_or(Ok(()), |lock| lock.release(&self.opened))
    }

    /// Whether this client must have the lock before it writes, and does not have it.
    #[must_use]
    pub fn needs_lock(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| !lock.is_held())
    }

    /// The size now: a change by another client is known within a tenth of a second.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.opened.size_bytes()
    }

    /// Reads the size again. Blocks only for librbd's own locks.
    ///
    /// # Errors
    /// librbd's.
    pub fn refresh_size(&self) -> io::Result<u64> {
        self.opened.refresh_size()
    }

    /// Sets the size. Blocks until the cluster has answered. Takes the lock meanwhile if this client does not have it.
    ///
    /// # Errors
    /// librbd's; another client has the lock.
    pub fn resize(self: &Arc<Self>, size_bytes: u64) -> io::Result<()> {
        self.take_lock(&|| false).map_err(io::Error::other)?;
        let image = &self.opened;
        // SAFETY: 1. the image is open.
        let resized = image.check(unsafe { (image.library().rbd_resize)(image.handle(), size_bytes) });
        let released = self.release_lock();
        resized.and(released)?;
        self.refresh_size().map(drop)
    }

    /// Makes all completed writes durable. Blocks until the cluster has answered.
    ///
    /// # Errors
    /// librbd's.
    pub fn flush(&self) -> io::Result<()> {
        // There were no writes since the lock was released, and librbd refuses a flush without it.
        if self.needs_lock() {
            return Ok(());
        }
        self.opened.flush().inspect_err(|error| {
            self.look(error.raw_os_error().map_or(0, |errno| -(errno as isize)));
        })
    }

    /// Room for a request that moves `len_bytes`. `None`: too many bytes are in flight. Then [`RbdImage::room_fd`] is
    /// written when there is room again.
    #[inline]
    #[must_use]
    pub fn reserve(self: &Arc<Self>, len_bytes: u64) -> Option<Reservation> {
        let has_room = len_bytes == 0 || self.in_flight.try_reserve(len_bytes);
        has_room.then(|| Reservation { image: Arc::clone(self), len_bytes })
    }

    /// Is written, edge by edge, when requests that [`RbdImage::reserve`] has refused may have room. All workers share it.
    #[must_use]
    pub fn room_fd(&self) -> BorrowedFd<'_> {
        self.in_flight.signal.0.as_fd()
    }

    /// Whether another client has broken or removed this image's lock, or has broken that of another image on the same
    /// connection. It never ends.
    #[inline]
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.opened.is_refused()
    }

    /// Looks at a result of librbd for a sign that this client may no longer write.
    pub(crate) fn look(&self, result: isize) {
        self.opened.look(result);
        // librbd itself has noticed that it no longer has the lock.
        if result == -READ_ONLY && self.lock.as_ref().is_some_and(Lock::is_held) {
            self.opened.note_lock_lost();
        }
    }

    pub(crate) fn opened(&self) -> &OpenImage {
        &self.opened
    }
}

impl Reservation {
    /// The image.
    #[must_use]
    pub fn image(&self) -> &Arc<RbdImage> {
        &self.image
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Gives the room back before the drop.
    #[inline]
    pub(crate) fn release(&mut self) {
        if self.len_bytes > 0 {
            self.image.in_flight.release(std::mem::take(&mut self.len_bytes));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
    }
}

impl Signal for RoomSignal {
    fn signal(&self) {
        // Never read: its counter would be full after 2^64 signals.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}
