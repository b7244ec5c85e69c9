//! Submits through a kernel thread (SQPOLL) without system calls.
//!
//! - The thread may read an entry as soon as `queue` returns, before `submit`.
//! - After `sqpoll_idle` without work the thread sleeps and costs nothing. The next call that is queued wakes it.
//! - The ring is full only until the thread has consumed a batch. The worker then waits in the kernel, so that no call
//!   depends on a later completion to start.
//!
//! Source: io_uring_setup(2), `IORING_SETUP_SQPOLL`.

use std::io;
use std::time::{Duration, Instant};

use io_uring::EnterFlags;

use super::{IGNORED, Uring};
use crate::backend::IoBackend;

/// Time limit of the wait for the thread, which needs microseconds unless the machine is overloaded.
const LET_GO_PATIENCE: Duration = Duration::from_secs(1);

impl Uring {
    pub(super) fn submit_to_thread(&mut self) -> io::Result<()> {
        loop {
            self.move_control();
            let is_full = self.ring.submission().is_full();
            let flags = self.wake_flag() | if is_full { EnterFlags::SQ_WAIT } else { EnterFlags::empty() };
            if !flags.is_empty() {
                self.enter_thread(flags)?;
            }
            if !is_full {
                return Ok(());
            }
        }
    }

    /// Waits until the thread has released the calls whose results the worker has seen. The thread posts a result, then
    /// releases the call's file, and starts no other call in between.
    pub(super) fn wait_for_thread(&mut self) {
        self.cancel(IGNORED); // cancels nothing: only shows when the thread has consumed it
        let deadline = Instant::now() + LET_GO_PATIENCE;
        while self.submit_to_thread().is_ok() && self.queued() > 0 && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }

    fn enter_thread(&self, flags: EnterFlags) -> io::Result<()> {
        // SAFETY: 1. queued entries: `queue` and `move_control` guarantee them; 2. no argument.
        let entered = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 0, flags.bits(), None) };
        match entered {
            Err(error) if error.raw_os_error() != Some(libc::EINTR) => Err(error),
            _ => Ok(()),
        }
    }

    /// The flag that `enter` needs to wake the thread for queued calls; `None` while the thread is awake.
    #[inline]
    pub(super) fn wake_flag(&mut self) -> EnterFlags {
        let queue = self.ring.submission();
        // The order matters. The drop of an earlier `SubmissionQueue` stored the new tail; then come the library's
        // fence and this load. The thread sets its flag, then loads the tail.
        if !queue.is_empty() && queue.need_wakeup() { EnterFlags::SQ_WAKEUP } else { EnterFlags::empty() }
    }
}
