//! Limits how much work each file has in flight, so that another file's call finds a short device queue.
//!
//! `next call → cost → fits the file's window: in flight | otherwise in the file's wait queue … a result → room again`
//!
//! - A turn (`turn.rs`) limits one submission. Devices and the kernel's threads serve calls in order of arrival, so a
//!   new call also waits for all calls of earlier submissions.
//! - Files with calls in flight share [`TOTAL`] equally, and their calls are short. No share is smaller than [`LEAST`],
//!   which an ordinary busy guest needs.
//! - A file counts as alone once it has started calls that cost [`LATELY`] without a call of another file in between.
//!   Its window is then [`ALONE`], enough to keep a device busy. The first call of another file ends this.
//! - An engine whose files all belong to one disk has no windows.
//! - A call always fits an empty window. A file with waiting ops therefore has a call in flight, whose result wakes the
//!   worker.
//!
//! `turn.rs` has the wait queues, `shares.rs` the op slots.

use crate::core::files::OpenFile;
use crate::core::op::OpState;
use crate::engine::FileId;

/// Fixed cost of a call in bytes: a device takes about as long to start a call as to move a page.
const CALL_BYTES: u64 = 4 << 10;
/// Longest call of a file that is not alone.
pub(crate) const SHORT_BYTES: u64 = 128 << 10;
/// Two short calls, or 33 calls of 4 KiB. An ordinary busy guest has 32 calls of 4 KiB in flight.
#[allow(clippy::cast_possible_truncation)] // 264 KiB
const LEAST: u32 = 2 * (CALL_BYTES + SHORT_BYTES) as u32;
/// Shared by all files with calls in flight: 128 calls of 4 KiB. The sum is larger once every file has only [`LEAST`].
#[allow(clippy::cast_possible_truncation)] // 1 MiB
const TOTAL: u32 = 128 * 2 * CALL_BYTES as u32;
/// Four of the longest `O_DIRECT` calls, or a thousand calls of 4 KiB.
pub(crate) const ALONE: u64 = 4 * (CALL_BYTES + (2 << 20));
/// Work that a file starts in a row before it counts as alone: about 2,000 calls of 4 KiB.
pub(crate) const LATELY: u64 = 16 << 20;

/// The cost of a call that moves `moved_bytes`.
#[inline]
#[allow(clippy::cast_possible_truncation)] // no call moves more than a turn's bytes or one of our buffers
pub(crate) fn cost_bytes(moved_bytes: u64) -> u32 {
    (CALL_BYTES + moved_bytes) as u32
}

/// The current window size, and which file is alone.
#[derive(Debug)]
pub(crate) struct Windows {
    /// True if the engine has files of several disks.
    pub are_kept: bool,
    total: u32,
    least: u32,
    /// Files with calls in flight.
    pub busy: u32,
    /// The window of a file that is not alone, computed from `busy`.
    beside_others: u64,
    /// The file that started the most recent call, and the work that it has started since another file's last call.
    last: FileId,
    in_a_row: u64,
}

impl Windows {
    pub fn new() -> Self {
        Self::of(TOTAL, LEAST)
    }

    pub fn of(total: u32, least: u32) -> Self {
        let beside_others = u64::from(total.max(least));
        let last = FileId(u32::MAX);
        Self { are_kept: false, total, least, busy: 0, beside_others, last, in_a_row: 0 }
    }

    /// Sets the longest call of `file`, and returns its window.
    #[inline]
    pub fn open(&self, id: FileId, file: &mut OpenFile) -> u64 {
        if self.is_alone(id) {
            file.most_bytes = file.longest_call_bytes();
            return ALONE;
        }
        file.most_bytes = SHORT_BYTES;
        self.beside_others
    }

    #[inline]
    fn is_alone(&self, id: FileId) -> bool {
        self.last == id && self.in_a_row >= LATELY
    }

    /// Charges the cost of a call that starts to the window of `file`.
    #[inline]
    pub fn take(&mut self, id: FileId, file: &mut OpenFile, cost: u32) {
        if file.window_used == 0 {
            self.busy += 1;
            self.share();
        }
        file.window_used += u64::from(cost);
        if self.last != id {
            (self.last, self.in_a_row) = (id, 0);
        }
        self.in_a_row += u64::from(cost);
    }

    /// Returns the cost of the op's completed call to its window.
    #[inline]
    pub fn give_back(&mut self, op: &mut OpState, file: &mut OpenFile) {
        if op.window_cost > 0 {
            file.window_used -= u64::from(std::mem::take(&mut op.window_cost));
            if file.window_used == 0 {
                self.busy -= 1;
                self.share();
            }
        }
    }

    #[inline]
    fn share(&mut self) {
        self.beside_others = u64::from((self.total / self.busy.max(1)).max(self.least));
    }

    /// Forgets a detached file without calls in flight. Its number may be reused.
    pub fn forget(&mut self, id: FileId) {
        if self.last == id {
            (self.last, self.in_a_row) = (FileId(u32::MAX), 0);
        }
    }
}

/// Whether a call of this cost fits a window.
#[inline]
pub(crate) fn has_room(window: u64, used: u64, cost: u32) -> bool {
    used == 0 || used + u64::from(cost) <= window
}
