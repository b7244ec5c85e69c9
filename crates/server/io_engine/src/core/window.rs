//! Windows: what one file's calls may have with the kernel at once, so that another file's call finds few before it.
//!
//! `next call → cost → within the file's window: with the kernel | otherwise in the file's line … a result → room again`
//!
//! - A turn (`turn.rs`) bounds one submission. What is submitted stays with the kernel until the device has carried it out,
//!   and devices and the kernel's threads work in order of arrival: a call waits for all that came before.
//! - Files that have calls with the kernel share [`TOTAL`] in equal parts, and their calls are short. No part is smaller
//!   than [`LEAST`], which an ordinary busy guest needs.
//! - A file is alone once it has started [`LATELY`] in a row, and no other file anything. It then has all that a device needs
//!   to be busy, [`ALONE`]. The first call of another file ends this.
//! - An engine with files of one disk has no windows.
//! - The first call within an empty window is always made, so a file with a line has a call with the kernel, whose
//!   result wakes the worker.
//!
//! Not here: lines (`turn.rs`), places for ops (`shares.rs`).

use crate::core::files::OpenFile;
use crate::core::op::OpState;
use crate::engine::FileId;

/// What a call costs beside its bytes: a device takes about as long to begin a call as to move a page.
const CALL_BYTES: u64 = 4 << 10;
/// The longest call of a file that is not alone.
pub(crate) const SHORT_BYTES: u64 = 128 << 10;
/// Two short calls, or 33 of 4 KiB: an ordinary busy guest asks for 32 of these.
#[allow(clippy::cast_possible_truncation)] // 264 KiB
const LEAST: u32 = 2 * (CALL_BYTES + SHORT_BYTES) as u32;
/// For all files with calls, while [`LEAST`] does not add up to more: 128 calls of 4 KiB.
#[allow(clippy::cast_possible_truncation)] // 1 MiB
const TOTAL: u32 = 128 * 2 * CALL_BYTES as u32;
/// Four of the longest calls past the page cache, or a thousand of 4 KiB.
pub(crate) const ALONE: u64 = 4 * (CALL_BYTES + (2 << 20));
/// What a file starts without another one in between until it is alone: some 2,000 calls of 4 KiB.
pub(crate) const LATELY: u64 = 16 << 20;

/// The cost of a call that moves `moved_bytes`.
#[inline]
#[allow(clippy::cast_possible_truncation)] // no call moves more than a turn's bytes, or a buffer of ours
pub(crate) fn cost_bytes(moved_bytes: u64) -> u32 {
    (CALL_BYTES + moved_bytes) as u32
}

/// How large windows are, and which file is alone.
#[derive(Debug)]
pub(crate) struct Windows {
    /// Files of several disks are there.
    pub are_kept: bool,
    total: u32,
    least: u32,
    /// Files with calls that take part of their window.
    pub busy: u32,
    /// The window of a file that is not alone: follows from `busy`.
    beside_others: u64,
    /// The file that started a call last, and what it has started since another one did.
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

    /// Sets how long calls of `file` may be. Returns its window.
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

    /// A call of `file` starts, and takes so much of its window.
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

    /// The call of `op` is with the kernel no longer.
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

    /// The file goes, and has no calls. Another one may get its number.
    pub fn forget(&mut self, id: FileId) {
        if self.last == id {
            (self.last, self.in_a_row) = (FileId(u32::MAX), 0);
        }
    }
}

/// Whether a call of that cost is within a window.
#[inline]
pub(crate) fn has_room(window: u64, used: u64, cost: u32) -> bool {
    used == 0 || used + u64::from(cost) <= window
}
