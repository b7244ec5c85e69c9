//! Closes descriptors that front-ends have passed, without making any serving thread wait.
//!
//! - Closing a file can take as long as its front-end likes: the kernel flushes a file on the front-end's FUSE file
//!   system, a TCP socket lingers, and a Unix socket closes the unread descriptors in it. Eventfds and memory close
//!   without waiting, so they are closed at once.
//! - One thread per disk closes all other descriptors. It exists while there is something to close, and inherits the
//!   system-call filter of the thread that started it. A waiting descriptor stays charged, so a disk's front-ends can
//!   block no more than their allowance. For descriptors that no disk is charged for,
//!   [`is_clogged`](Closing::is_clogged) enforces the limit.
//! - The thread waits until every other owner has dropped the descriptor, so that it is the one that closes it.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backing::is_at_hand;

/// Limit of uncharged descriptors that may wait to be closed: sockets, and descriptors beyond a disk's allowance.
const MOST_UNCHARGED: usize = 64;
/// Stack size of a closing thread, which makes one system call after another and needs little.
const STACK_BYTES: usize = 64 << 10;
/// Gives another thread time to drop a descriptor that it is using.
const PAUSE: Duration = Duration::from_millis(1);

/// A charge that is held until a descriptor is closed.
pub(crate) type Held = Arc<dyn Debug + Send + Sync>;

#[derive(Debug)]
struct Leaving {
    // Declared first, so that it is closed before the charge is released.
    fd: Arc<OwnedFd>,
    charge: Option<Held>,
}

#[derive(Debug, Default)]
struct State {
    leaving: VecDeque<Leaving>,
    uncharged: usize,
    has_thread: bool,
}

/// The descriptors of one disk that wait to be closed.
#[derive(Debug, Default)]
pub(crate) struct Closing(Mutex<State>);

impl Closing {
    /// Closes `fd` when its last other owner has dropped it, then releases `charge`.
    pub(crate) fn close(self: &Arc<Self>, fd: &Arc<OwnedFd>, charge: Option<Held>) {
        // The caller drops its own reference next, which closes the file.
        if closes_at_once(fd) {
            return;
        }
        let mut state = self.lock();
        state.uncharged += usize::from(charge.is_none());
        state.leaving.push_back(Leaving { fd: Arc::clone(fd), charge });
        self.have_thread(&mut state);
    }

    /// Whether too many uncharged descriptors wait to be closed.
    pub(crate) fn is_clogged(self: &Arc<Self>) -> bool {
        let mut state = self.lock();
        self.have_thread(&mut state);
        state.uncharged >= MOST_UNCHARGED
    }

    /// Starts the thread if descriptors wait to be closed. If the host refuses, the next call tries again.
    fn have_thread(self: &Arc<Self>, state: &mut State) {
        if state.has_thread || state.leaving.is_empty() {
            return;
        }
        let closing = Arc::clone(self);
        let thread = std::thread::Builder::new().name("bareblk-close".into()).stack_size(STACK_BYTES);
        state.has_thread = thread.spawn(move || closing.run()).is_ok();
    }

    fn run(&self) {
        while let Some(Leaving { fd, charge }) = self.next() {
            while Arc::strong_count(&fd) > 1 {
                std::thread::sleep(PAUSE);
            }
            drop(fd);
            self.lock().uncharged -= usize::from(charge.is_none());
        }
    }

    fn next(&self) -> Option<Leaving> {
        let mut state = self.lock();
        let next = state.leaving.pop_front();
        state.has_thread = next.is_some();
        next
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn closes_at_once(fd: &OwnedFd) -> bool {
    is_at_hand(fd) || is_eventfd(fd)
}

/// Compares the kernel's name for the descriptor, because no file path begins like this.
fn is_eventfd(fd: &OwnedFd) -> bool {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    link.is_ok_and(|link| link.to_bytes().starts_with(b"anon_inode:[eventfd"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::{Budget, Limits, Quota};

    #[test]
    fn quota_is_clogged_while_many_uncharged_descriptors_wait_and_not_afterwards() {
        let quota = Quota::of(&Budget::new(Limits::of_process()));
        let files: Vec<Arc<OwnedFd>> =
            (0..MOST_UNCHARGED).map(|_| Arc::new(std::io::pipe().unwrap().0.into())).collect();
        files.iter().skip(1).for_each(|fd| quota.close(fd));
        assert!(!quota.is_clogged());
        quota.close(&files[0]);
        assert!(quota.is_clogged(), "each has another owner");
        drop(files);
        while quota.is_clogged() {
            std::thread::yield_now();
        }
    }
}
