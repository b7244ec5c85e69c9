//! One thread that waits for connections on the listening sockets of all disks.
//!
//! `Acceptor::run (epoll) → id of a socket with a new connection → exports.rs`
//!
//! Each socket is registered once with epoll, so accepting a connection, or adding and removing a socket while the
//! thread sleeps, costs the same with a thousand sockets as with one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use tracing::error;

use crate::host::signal::signal;

/// An id that no socket has.
const QUIT: u64 = u64::MAX;
/// The pause between two calls of `retry`.
const RETRY: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Events per call of `epoll_wait`. The next call returns the rest.
const EVENTS: usize = 64;

#[derive(Debug)]
pub(crate) struct Acceptor {
    epoll: OwnedFd,
    quit: OwnedFd,
}

impl Acceptor {
    /// # Errors
    /// The process has no free descriptors.
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let quit = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &quit, EventData::new_u64(QUIT), EventFlags::IN)?;
        Ok(Self { epoll, quit })
    }

    /// Watches the socket. Does nothing if the socket is already watched.
    ///
    /// # Errors
    /// The kernel is out of memory, or the user has reached the limit of watches (`fs.epoll.max_user_watches`).
    pub(crate) fn add(&self, socket: impl AsFd, id: u64) -> io::Result<()> {
        match epoll::add(&self.epoll, socket, EventData::new_u64(id), EventFlags::IN) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Stops watching the socket. An earlier event may still be reported.
    pub(crate) fn remove(&self, socket: impl AsFd) {
        // Fails for a socket that was never added, which is harmless.
        let _ = epoll::delete(&self.epoll, socket);
    }

    /// Ends [`Acceptor::run`], or its next call if it is not running.
    pub(crate) fn quit(&self) {
        signal(&self.quit);
    }

    /// Calls `ready` for each socket with a new connection, until [`Acceptor::quit`]. Calls `retry` before each wait,
    /// and ends a wait after a pause if `retry` returned true.
    pub(crate) fn run(&self, mut ready: impl FnMut(u64), mut retry: impl FnMut() -> bool) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let timeout = retry().then_some(RETRY);
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return error!("cannot accept further front-ends of any disk: {errno}"),
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    QUIT => return,
                    id => ready(id),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_is_called_again_without_any_connection_until_it_has_nothing_left() {
        let acceptor = Acceptor::new().unwrap();
        let mut calls = 0;
        let retry = || {
            calls += 1;
            if calls == 3 {
                acceptor.quit();
            }
            calls < 3
        };
        acceptor.run(|id| panic!("a connection to {id} that no test made"), retry);
        assert_eq!(calls, 3);
    }
}
