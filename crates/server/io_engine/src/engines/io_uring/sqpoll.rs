//! Submitting through a kernel thread (SQPOLL): what is queued is taken without a system call.
//!
//! - An entry may be read from the moment `queue` returns: not only from `submit` on.
//! - The thread sleeps after `sqpoll_idle` without work, and costs nothing then; the one who queues wakes it.
//! - The ring is full only until the thread has taken a batch: whoever meets that waits in the kernel, so that
//!   nothing is left behind that only a completion would set going.
//!
//! Source: io_uring_setup(2), `IORING_SETUP_SQPOLL`. Not here: the flags (`setup.rs`).

use std::io;
use std::time::{Duration, Instant};

use io_uring::EnterFlags;

use super::{IGNORED, Uring};
use crate::backend::IoBackend;

/// The thread takes what is queued in microseconds, unless the machine is overloaded.
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

    /// Waits until the thread has let go of calls whose results were seen. It posts a result first and lets go of
    /// the call's file after that; but it takes nothing new in between.
    pub(super) fn wait_for_thread(&mut self) {
        self.cancel(IGNORED); // nothing has this name: only to see it taken
        let deadline = Instant::now() + LET_GO_PATIENCE;
        while self.submit_to_thread().is_ok() && self.queued() > 0 && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }

    fn enter_thread(&self, flags: EnterFlags) -> io::Result<()> {
        // SAFETY: 1. queued entries: `queue` and `move_control` vouched for them; 2. no argument.
        let entered = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 0, flags.bits(), None) };
        match entered {
            Err(error) if error.raw_os_error() != Some(libc::EINTR) => Err(error),
            _ => Ok(()),
        }
    }

    /// What `enter` needs so that the thread sees what is queued; nothing while it is awake.
    #[inline]
    pub(super) fn wake_flag(&mut self) -> EnterFlags {
        let queue = self.ring.submission();
        // The order matters: the library's fence lies between the new tail, which the drop of an earlier
        // `SubmissionQueue` stored, and this look. The thread sets its flag, then looks at the tail.
        if !queue.is_empty() && queue.need_wakeup() { EnterFlags::SQ_WAKEUP } else { EnterFlags::empty() }
    }
}
