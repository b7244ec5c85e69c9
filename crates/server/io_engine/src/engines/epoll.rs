//! Sleeps on eventfds with epoll, for engines that cannot poll fds themselves.
//!
//! The watches are edge-triggered and never read, so they behave as in io_uring: each write is an edge, and several may
//! merge.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::engine::{Event, WatchId, WatchToken};
use crate::engines::watches::WatchTable;

/// Events per system call. The next call returns the rest.
const BATCH: usize = 64;

/// Epoll data of an fd that only ends a sleep. No watch has this value, because the top bit of a generation is clear.
const WAKER: u64 = u64::MAX;

/// The epoll set that a backend without a ring sleeps on: watched descriptors, and descriptors that only end a sleep.
#[derive(Debug)]
pub struct EpollWatcher {
    epoll: OwnedFd,
    watches: WatchTable,
    /// A descriptor that only ends a sleep has done so.
    woken: bool,
}

impl EpollWatcher {
    /// Makes an empty set.
    ///
    /// # Errors
    /// Errors of `epoll_create1`.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, watches: WatchTable::default(), woken: false })
    }

    /// Reports writes to `fd` from now on.
    ///
    /// # Errors
    /// Errors of `epoll_ctl`.
    pub fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        let id = self.watches.insert(Arc::clone(&fd), token);
        let data = epoll::EventData::new_u64(u64::from(id.generation) << 32 | u64::from(id.index));
        let added = epoll::add(&self.epoll, fd.as_fd(), data, epoll::EventFlags::IN | epoll::EventFlags::ET);
        if added.is_err() {
            self.watches.stop(id);
            self.watches.released(id);
        }
        Ok(added.map(|()| id)?)
    }

    /// Lets `fd` end a sleep without reporting it. The caller keeps `fd` open.
    ///
    /// # Errors
    /// Errors of `epoll_ctl`.
    pub fn add_waker(&mut self, fd: impl AsFd) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(WAKER), flags)?)
    }

    /// Ends what [`EpollWatcher::add_waker`] began. Closing the last descriptor ends it too.
    pub(crate) fn remove_socket(&mut self, socket: impl AsFd) {
        let removed = epoll::delete(&self.epoll, socket);
        debug_assert!(removed.is_ok());
    }

    /// Sets whether the socket also ends a sleep when it becomes writable.
    ///
    /// # Errors
    /// Errors of `epoll_ctl`.
    pub(crate) fn set_wants_room(&mut self, socket: impl AsFd, wants_room: bool) -> io::Result<()> {
        let room = if wants_room { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET | room;
        Ok(epoll::modify(&self.epoll, socket, epoll::EventData::new_u64(WAKER), flags)?)
    }

    /// A descriptor that is readable when `wait` would not sleep.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Ends a watch.
    pub fn unwatch(&mut self, id: WatchId) {
        if let Some(fd) = self.watches.active_fd(id) {
            let removed = epoll::delete(&self.epoll, fd.as_fd());
            debug_assert!(removed.is_ok());
        }
        self.watches.stop(id);
        self.watches.released(id);
    }

    /// Whether nothing is watched.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.watches.is_empty()
    }

    /// Sleeps until a watched fd is written to or the timeout expires. A signal ends the sleep early.
    ///
    /// # Errors
    /// Errors of `epoll_wait`.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = if self.watches.has_ready() { Some(Duration::ZERO) } else { timeout };
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut batch = [const { MaybeUninit::uninit() }; BATCH];
        let fired = match epoll::wait(&self.epoll, &mut batch, timeout.as_ref()) {
            Ok((fired, _)) => fired,
            Err(Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        for event in fired {
            let data = event.data.u64();
            self.woken |= data == WAKER;
            #[allow(clippy::cast_possible_truncation)] // the halves of a 64-bit number
            let id = WatchId { index: data as u32, generation: (data >> 32) as u32 };
            self.watches.fire(id, Ok(()));
        }
        Ok(())
    }

    /// Whether a descriptor that only ends a sleep has done so since [`EpollWatcher::forget_woken`]. Its event is not
    /// reported again.
    pub(crate) fn is_woken(&self) -> bool {
        self.woken
    }

    /// Called before what such descriptors tell about is looked at.
    pub(crate) fn forget_woken(&mut self) {
        self.woken = false;
    }

    /// Appends one event for each watch that fired.
    pub fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.watches.take_ready(events);
    }
}
