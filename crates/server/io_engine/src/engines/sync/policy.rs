//! Decides from earlier results whether the worker makes a file's calls itself.
//!
//! The worker tries each time, however many attempts have failed. Skipping attempts saves no processor time
//! (docs/decisions/0014), and an attempt starts the read-ahead.

use std::fmt;

use crate::backend::{Call, Verb};
use crate::choose::storage::Storage;

/// Longest hole that the worker punches itself. Freeing memory takes tens of microseconds per MiB of pages.
const MAX_HOLE_BYTES: u64 = 1 << 20;

/// Which thread makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The worker: the call does not block.
    Here,
    /// The worker, which blocks until the device is done.
    HereAndWait,
    /// The worker, with `RWF_NOWAIT`; see [`Policy::is_answer`].
    WithoutWaiting,
    /// The pool.
    Never,
}

/// How to make the calls of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// The page cache is the file's storage.
    InMemory,
    /// Calls bypass the page cache.
    Direct,
    /// Calls use the page cache. The worker makes non-blocking calls in each direction until the kernel refuses them.
    Cached { nowait_reads: bool, nowait_writes: bool },
}

impl Policy {
    pub fn of(storage: &Storage) -> Self {
        match storage {
            Storage { ram_backed: true, .. } => Self::InMemory,
            Storage { direct: true, .. } => Self::Direct,
            _ => Self::Cached {
                nowait_reads: storage.nowait_reads,
                nowait_writes: storage.nowait_writes != Some(false),
            },
        }
    }

    #[inline]
    pub fn attempt(&self, call: &Call) -> Attempt {
        match (*self, call.verb) {
            (Self::InMemory, Verb::Read | Verb::Write | Verb::Sync) => Attempt::Here,
            (Self::InMemory, Verb::Allocate) if call.len_bytes <= MAX_HOLE_BYTES => Attempt::Here,
            (_, Verb::Sync | Verb::Allocate | Verb::Discard) => Attempt::Never,
            // A durable write ends with a flush of the device.
            (_, Verb::Write) if call.flags & libc::RWF_DSYNC != 0 => Attempt::Never,
            (Self::Direct, _) => Attempt::HereAndWait,
            (Self::Cached { nowait_reads: true, .. }, Verb::Read)
            | (Self::Cached { nowait_writes: true, .. }, Verb::Write) => Attempt::WithoutWaiting,
            (Self::Cached { .. }, _) => Attempt::Never,
        }
    }

    /// Evaluates the result of an attempt with `RWF_NOWAIT`. Returns whether it is the call's final result, possibly
    /// short or an error. If not, the pool makes the call again.
    ///
    /// A read of 0 bytes is not final: Linux 5.9 and 5.10 also return it in the middle of the file (preadv2(2), BUGS).
    #[inline]
    pub fn is_answer(&mut self, call: &Call, result: i32) -> bool {
        match result {
            1.. => true,
            0 => call.verb != Verb::Read,
            _ => self.is_final_error(call, -result),
        }
    }

    #[cold]
    fn is_final_error(&mut self, call: &Call, errno: i32) -> bool {
        if let (libc::EOPNOTSUPP, Self::Cached { nowait_reads, nowait_writes }) = (errno, self) {
            let direction = if call.verb == Verb::Read { nowait_reads } else { nowait_writes };
            *direction = false;
        }
        errno != libc::EAGAIN && errno != libc::EOPNOTSUPP
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InMemory => "all calls in the worker thread",
            Self::Direct => "reads and writes in the worker, which waits",
            Self::Cached { nowait_reads: false, nowait_writes: false } => "all in the pool",
            Self::Cached { .. } => "non-blocking calls in the worker, others in the pool",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Buffers;

    const ON_DISK: Storage = Storage {
        direct: false,
        ram_backed: false,
        tells_pages: false,
        dax: false,
        nowait_reads: true,
        nowait_writes: None,
        block_device: false,
    };

    fn call(verb: Verb, flags: i32, len_bytes: u64) -> Call {
        Call { verb, flags, offset_bytes: 0, len_bytes, buffers: Buffers::None }
    }

    fn attempts(storage: &Storage) -> [Attempt; 5] {
        let calls = [
            call(Verb::Read, 0, 4096),
            call(Verb::Write, 0, 4096),
            call(Verb::Write, libc::RWF_DSYNC, 4096),
            call(Verb::Sync, 0, 0),
            call(Verb::Allocate, libc::FALLOC_FL_PUNCH_HOLE, 4096),
        ];
        calls.map(|call| Policy::of(storage).attempt(&call))
    }

    use Attempt::{Here, HereAndWait, Never, WithoutWaiting};

    #[test]
    fn everything_short_is_done_here_in_memory_however_it_was_opened() {
        let storage = Storage { ram_backed: true, direct: true, nowait_reads: false, ..ON_DISK };
        assert_eq!(attempts(&storage), [Here; 5]);
    }

    #[test]
    fn large_hole_in_memory_goes_to_the_pool() {
        let policy = Policy::of(&Storage { ram_backed: true, ..ON_DISK });
        let hole = call(Verb::Allocate, libc::FALLOC_FL_PUNCH_HOLE, MAX_HOLE_BYTES + 1);
        assert_eq!(policy.attempt(&hole), Never);
    }

    #[test]
    fn worker_waits_for_direct_reads_and_writes_but_not_for_flushes() {
        let storage = Storage { direct: true, ..ON_DISK };
        assert_eq!(attempts(&storage), [HereAndWait, HereAndWait, Never, Never, Never]);
    }

    #[test]
    fn cached_calls_are_tried_without_waiting_except_those_that_flush() {
        assert_eq!(attempts(&ON_DISK), [WithoutWaiting, WithoutWaiting, Never, Never, Never]);
    }

    #[test]
    fn file_that_refuses_nowait_is_never_tried() {
        let storage = Storage { nowait_reads: false, nowait_writes: Some(false), ..ON_DISK };
        assert_eq!(attempts(&storage), [Never; 5]);
    }

    #[test]
    fn direction_that_the_file_system_refuses_is_not_tried_again_and_the_other_is() {
        let mut policy = Policy::of(&ON_DISK);
        let (read, write) = (call(Verb::Read, 0, 4096), call(Verb::Write, 0, 4096));
        assert!(!policy.is_answer(&write, -libc::EOPNOTSUPP));
        assert_eq!([policy.attempt(&read), policy.attempt(&write)], [WithoutWaiting, Never]);
    }

    #[test]
    fn only_what_may_be_otherwise_with_waiting_is_made_again() {
        let mut policy = Policy::of(&ON_DISK);
        let read = call(Verb::Read, 0, 4096);
        let results = [4096, 512, 0, -libc::EAGAIN, -libc::EIO, -libc::EFAULT];
        let stands = results.map(|result| policy.is_answer(&read, result));
        assert_eq!(stands, [true, true, false, false, true, true]);
    }
}
