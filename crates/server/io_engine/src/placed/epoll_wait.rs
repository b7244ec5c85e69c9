//! The epoll set on which a worker sleeps in a placed engine: its waker's eventfd, and for the owner the real engine's
//! descriptor.
//!
//! - One epoll descriptor lives as long as the placed engine, so that the worker's base engine can watch it. It is
//!   level-triggered: an event that was not consumed wakes the worker again.
//! - The real engine watches no descriptors. Otherwise the eventfd of another io_uring would be signalled only once.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

use super::waker::{Signal, Waker};

/// An eventfd.
#[derive(Debug)]
pub(super) struct Eventfd(OwnedFd);

impl Signal for Eventfd {
    fn signal(&self) {
        // Fails only if the counter is full, and then the descriptor is already readable.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// A worker's waker.
pub(super) type WorkerWaker = Waker<Eventfd>;

#[derive(Debug)]
pub(super) struct EpollWait {
    epoll: OwnedFd,
    pub waker: Arc<WorkerWaker>,
    /// The real engine's descriptor.
    inner: Option<OwnedFd>,
    asleep: bool,
    /// The waker was signalled, but its eventfd was not yet read.
    signalled: bool,
}

fn add(epoll: &OwnedFd, fd: &OwnedFd) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
}

impl EpollWait {
    pub fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add(&epoll, &fd)?;
        let waker = Arc::new(Waker::new(Eventfd(fd)));
        Ok(Self { epoll, waker, inner: None, asleep: false, signalled: false })
    }

    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.epoll.try_clone()
    }

    /// Adds `fd` to the epoll set.
    pub fn watch_inner(&mut self, fd: OwnedFd) -> io::Result<()> {
        add(&self.epoll, &fd)?;
        self.inner = Some(fd);
        Ok(())
    }

    pub fn forget_inner(&mut self) {
        if let Some(fd) = self.inner.take() {
            // Closing `fd` is not enough: the file may have other descriptors, and would stay in the set.
            let removed = epoll::delete(&self.epoll, fd.as_fd());
            debug_assert!(removed.is_ok());
        }
    }

    /// Tells publishers to send a signal from now on. The caller checks for work once more before it sleeps.
    pub fn begin_sleep(&mut self) {
        self.asleep = true;
        self.waker.begin_sleep();
    }

    #[inline]
    pub fn end_sleep(&mut self) {
        if self.asleep {
            self.asleep = false;
            self.signalled |= self.waker.end_sleep();
        }
        if self.signalled {
            self.clear_signal();
        }
    }

    /// The publisher may not have written to the eventfd yet. `signalled` stays set until a read succeeds.
    #[cold]
    fn clear_signal(&mut self) {
        let mut count = [0; 8];
        self.signalled = rustix::io::read(&self.waker.signal.0, &mut count).is_err();
    }

    pub fn sleep(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}
