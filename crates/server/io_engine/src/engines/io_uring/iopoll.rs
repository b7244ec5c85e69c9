//! The second ring: `O_DIRECT` reads and writes whose completions the engine polls for (IOPOLL).
//!
//! `queue → submit → poll: enter the kernel, which polls the device → completion ring → pop`
//!
//! - The kernel refuses all other calls on such a ring: kicks, syncs and `fallocate` use the first ring.
//! - A call completes only when the engine polls. While calls are in flight, `reap` and `wait` poll, and `wait` does
//!   not sleep.
//! - `iopoll_probe.rs` tests each file. A file may still refuse polling later, for example because its first block was
//!   a hole: its first call then fails, and that call and all later ones use the first ring.
//! - A call on this ring cannot be cancelled, and ends only when the engine polls.

use std::io;
use std::os::fd::AsRawFd;

use io_uring::{EnterFlags, IoUring, Submitter, squeue};

use super::iopoll_probe;
use crate::backend::{QueueFull, RawResult, Target, Verb};
use crate::engine::FileSpec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileCheck {
    Probe,
    /// Accepts every file. For tests.
    TakeAll,
}

pub(super) struct PolledRing {
    ring: IoUring,
    check: FileCheck,
    /// Whether a file's transfers use this ring, by index in the table of registered files.
    takes: Box<[bool]>,
    /// The file of each op, to identify the file of a refused call.
    file_of: Vec<u32>,
    /// Completions that `pop` may still return in this pass.
    budget: usize,
    /// Calls that are queued or in the kernel.
    calls: usize,
}

impl PolledRing {
    pub fn new(ring: IoUring, check: FileCheck, depth: u32, registered_files: u32) -> Self {
        let takes = vec![false; registered_files as usize].into();
        Self { ring, check, takes, file_of: vec![0; depth as usize], budget: 0, calls: 0 }
    }

    pub fn enable(&self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()
    }

    pub fn submitter(&self) -> Submitter<'_> {
        self.ring.submitter()
    }

    /// Allocates space for this many calls.
    pub fn expect(&mut self, calls: u32) {
        let calls = self.file_of.len().max(calls as usize);
        self.file_of.resize(calls, 0);
    }

    /// Accepts the file, or logs why its transfers use the first ring.
    pub fn register_file(&mut self, index: u32, spec: &FileSpec) {
        let checked = if self.check == FileCheck::Probe { iopoll_probe::check(spec) } else { Ok(()) };
        if let Err(reason) = checked.and_then(|()| self.add_file(index, spec)) {
            tracing::warn!("IOPOLL is not used for an image: {reason}");
        }
    }

    pub(super) fn add_file(&mut self, index: u32, spec: &FileSpec) -> Result<(), String> {
        let takes = self.takes.get_mut(index as usize).ok_or("the table of registered files is full")?;
        let fd = spec.file().map_err(|error| error.to_string())?.as_raw_fd();
        let registered = self.ring.submitter().register_files_update(index, &[fd]);
        registered.map_err(|error| format!("the image cannot be registered: {error}"))?;
        *takes = true;
        Ok(())
    }

    pub fn unregister_file(&mut self, index: u32) {
        let Some(takes) = self.takes.get_mut(index as usize) else { return };
        *takes = false;
        if let Err(error) = self.ring.submitter().register_files_update(index, &[-1]) {
            tracing::warn!(%error, "io_uring could not release a detached file, which stays open");
        }
    }

    #[inline]
    pub fn takes(&self, target: Target, verb: Verb) -> bool {
        let Target::Registered(index) = target else { return false };
        matches!(verb, Verb::Read | Verb::Write) && self.takes.get(index as usize).is_some_and(|takes| *takes)
    }

    /// # Safety
    /// Like [`IoBackend::queue`](crate::IoBackend::queue): the memory that `entry` points to must stay valid until
    /// `pop` has returned the result.
    #[inline]
    pub unsafe fn queue(&mut self, entry: &squeue::Entry, target: Target) -> Result<(), QueueFull> {
        // SAFETY: 1. the caller keeps buffers and file alive until it has the result.
        unsafe { self.ring.submission().push(entry) }.map_err(|_| QueueFull)?;
        if let (Target::Registered(index), Some(file)) =
            (target, self.file_of.get_mut(op_of(entry.get_user_data())))
        {
            *file = index;
        }
        self.calls += 1;
        Ok(())
    }

    /// Starts the queued calls, as [`IoBackend::submit`](crate::IoBackend::submit) does.
    pub fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            match self.ring.submitter().submit() {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::EBUSY) => return Ok(()),
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Whether calls are in flight, so that the engine must poll.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.calls > 0
    }

    /// Makes the kernel poll the devices once. Returns whether results are available.
    pub fn poll(&mut self) -> bool {
        if self.ring.completion().is_empty() && self.calls > 0 {
            // SAFETY: 1. nothing is submitted, and there is no argument.
            let polled = unsafe {
                self.ring.submitter().enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None)
            };
            // An error means a signal or a failed device. The calls on a failed device end with their own errors.
            let _ = polled;
        }
        !self.ring.completion().is_empty()
    }

    pub fn begin_reap(&mut self) {
        self.poll();
        self.budget = self.ring.completion().len();
    }

    #[inline]
    pub fn pop(&mut self) -> Option<RawResult> {
        self.budget = self.budget.checked_sub(1)?;
        let cqe = self.ring.completion().next()?;
        self.calls -= 1;
        let (user_data, mut result) = (cqe.user_data(), cqe.result());
        if result == -libc::EOPNOTSUPP {
            self.stop_polling(user_data);
            result = -libc::EAGAIN; // the core repeats the call, which then uses the first ring
        }
        Some(RawResult { user_data, result })
    }

    #[cold]
    fn stop_polling(&mut self, user_data: u64) {
        let Some(&index) = self.file_of.get(op_of(user_data)) else { return };
        let takes = self.takes.get_mut(index as usize);
        if takes.is_some_and(std::mem::take) {
            tracing::info!(
                file = index,
                "IOPOLL is no longer used for this file: its device refused a polled call"
            );
        }
    }
}

/// The index of an op in the op table (`op_table.rs`).
#[inline]
#[allow(clippy::cast_possible_truncation)] // the lower half of a 64-bit number
fn op_of(user_data: u64) -> usize {
    user_data as u32 as usize
}
