//! The data buffers of one request: guest memory as `iovec`s for the kernel, and a reference that keeps it
//! mapped.
//!
//! The pointers are valid only while their regions stay mapped. So each `IoVecs` holds the [`GuestMemory`]
//! that it was filled from, and an engine owns the `IoVecs` while the kernel uses it. The reference is kept
//! from one request to the next: refilling from the same memory needs no atomic operation.
//!
//! - The capacity is fixed at creation; a request allocates nothing.
//! - An `IoVecs` is one pointer wide. It is moved six times between ring and completion, and each read of a larger
//!   value would stall on the previous move's narrower stores.
//! - [`IoVecs::advance`] drops the completed bytes, so that a short transfer can be resumed.

use std::fmt;
use std::sync::Arc;

use vm_memory::VolatileSlice;

use crate::memory::{AccessError, GuestMemory, GuestRange, MemoryView};

/// Why a request's buffers cannot be represented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FillError {
    /// Part of a buffer is outside the guest's memory.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The buffers have more pieces than this value can hold; the caller needs a larger one.
    #[error("the request's buffers need more than {capacity} pieces")]
    Full {
        /** Capacity in pieces. */
        capacity: usize,
    },
}

/// Buffers of one request, in order. The default value has no capacity and allocates nothing.
#[derive(Default)]
pub struct IoVecs {
    /// `None` without capacity and memory.
    pieces: Option<Box<Pieces>>,
}

/// A place in the remaining bytes of an [`IoVecs`]. The default value is their start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceCursor {
    piece: usize,
    cut: usize,
}

const NO_PIECE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

#[derive(Default)]
struct Pieces {
    memory: Option<Arc<GuestMemory>>,
    /// Only the first `count` elements are in use.
    vecs: Box<[libc::iovec]>,
    count: usize,
    /// Pieces before this one are completed; they still have the values that they were filled with.
    first: usize,
    /// Completed bytes of the piece at `first`; they are cut off its start.
    cut: usize,
    remaining_bytes: u64,
}

// SAFETY: 1. the pointers lead into mappings that `memory` keeps alive, on any thread;
// 2. they are only used by the kernel and by volatile copies.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// Allocates room for `capacity` pieces; with 0, allocates nothing.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let pieces = || Box::new(Pieces { vecs: vec![NO_PIECE; capacity].into(), ..Pieces::default() });
        Self { pieces: (capacity > 0).then(pieces) }
    }

    /// Capacity in pieces.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pieces.as_ref().map_or(0, |pieces| pieces.vecs.len())
    }

    /// Bytes not yet completed.
    #[inline]
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.pieces.as_ref().map_or(0, |pieces| pieces.remaining_bytes)
    }

    /// Replaces the contents with `ranges` of `view`'s memory.
    ///
    /// # Errors
    /// [`FillError`]; the value is empty then.
    pub fn fill(
        &mut self,
        view: &MemoryView,
        ranges: impl IntoIterator<Item = GuestRange>,
    ) -> Result<(), FillError> {
        let pieces = self.pieces.get_or_insert_default();
        pieces.clear();
        pieces.hold(view.memory());
        let filled = pieces.fill(view, ranges);
        if filled.is_err() {
            pieces.clear();
        }
        filled
    }

    /// Replaces the contents with one range, if it is inside one region. Otherwise returns false, and the value is
    /// unchanged: [`IoVecs::fill`] splits the range, or reports why it cannot.
    #[inline]
    pub fn fill_one(&mut self, view: &MemoryView, range: GuestRange) -> bool {
        let Some(pieces) = &mut self.pieces else { return false };
        let (Some(host), Some(piece)) = (view.host_of(range), pieces.vecs.first_mut()) else { return false };
        *piece = libc::iovec { iov_base: host.as_ptr().cast(), iov_len: range.len_bytes as usize };
        pieces.hold(view.memory());
        (pieces.count, pieces.first, pieces.cut) = (1, 0, 0);
        pieces.remaining_bytes = u64::from(range.len_bytes);
        true
    }

    /// Drops the buffers; keeps the reference to the memory for the next request.
    #[inline]
    pub fn clear(&mut self) {
        if let Some(pieces) = &mut self.pieces {
            pieces.clear();
        }
    }

    /// Drops the buffers and the reference to the memory.
    pub fn release(&mut self) {
        if let Some(pieces) = &mut self.pieces {
            pieces.clear();
            pieces.memory = None;
        }
    }

    /// Moves the remaining buffers into a new value, for an owner that keeps them longer than the request lasts.
    #[must_use]
    pub fn take_rest(&mut self) -> Self {
        let Some(pieces) = &mut self.pieces else { return Self::default() };
        let vecs: Box<[_]> = pieces.vecs[pieces.first..pieces.count].into();
        let rest = Pieces {
            memory: pieces.memory.clone(),
            count: vecs.len(),
            first: 0,
            cut: 0,
            remaining_bytes: pieces.remaining_bytes,
            vecs,
        };
        pieces.clear();
        Self { pieces: Some(Box::new(rest)) }
    }

    /// Makes `part` describe the next `bytes` of the remaining buffers from `cursor` on, or fewer if `part` has no room for
    /// more pieces. Moves the cursor behind them, and returns their number. `self` stays unchanged: it must not be advanced
    /// while a cursor is in use.
    pub fn part(&self, cursor: &mut PieceCursor, bytes: u64, part: &mut Self) -> u64 {
        let (Some(memory), Some(into)) = (self.memory(), &mut part.pieces) else { return 0 };
        into.clear();
        into.hold(memory);
        while into.remaining_bytes < bytes && into.count < into.vecs.len() {
            let Some(piece) = self.as_raw().get(cursor.piece) else { break };
            let left = usize::try_from(bytes - into.remaining_bytes).unwrap_or(usize::MAX);
            let iov_len = left.min(piece.iov_len - cursor.cut);
            into.vecs[into.count] =
                libc::iovec { iov_base: piece.iov_base.wrapping_byte_add(cursor.cut), iov_len };
            into.count += 1;
            into.remaining_bytes += iov_len as u64;
            cursor.cut += iov_len;
            if cursor.cut == piece.iov_len {
                *cursor = PieceCursor { piece: cursor.piece + 1, cut: 0 };
            }
        }
        into.remaining_bytes
    }

    /// Moves the buffers to the same guest addresses in `view`'s memory, which replaces their current memory.
    ///
    /// # Errors
    /// [`FillError`] if the new memory does not hold them; the value is empty then, and holds no memory.
    pub fn rebind(&mut self, view: &MemoryView) -> Result<(), FillError> {
        let Some(memory) = self.memory().cloned() else { return Ok(()) };
        let range = |piece: &libc::iovec| {
            let host = piece.iov_base as usize;
            let addr = memory.regions().iter().find_map(|region| region.guest_of(host));
            // A piece is part of a range, whose length has 32 bits.
            let len_bytes = u32::try_from(piece.iov_len).unwrap_or(u32::MAX);
            GuestRange { addr: addr.unwrap_or(u64::MAX), len_bytes }
        };
        let ranges: Vec<_> = self.as_raw().iter().map(range).collect();
        // The new regions may have other boundaries: a piece may be split at each region's end.
        let mut rebound = Self::with_capacity(ranges.len() + view.memory().regions().len());
        let filled = rebound.fill(view, ranges);
        if filled.is_err() {
            rebound.release();
        }
        *self = rebound;
        filled
    }

    #[inline]
    fn memory(&self) -> Option<&Arc<GuestMemory>> {
        self.pieces.as_ref()?.memory.as_ref()
    }

    /// Whether the buffers are in `memory`.
    #[inline]
    #[must_use]
    pub fn holds(&self, memory: &Arc<GuestMemory>) -> bool {
        self.memory().is_some_and(|held| Arc::ptr_eq(held, memory))
    }

    /// Whether a page of the memory is missing because its file was truncated. Bytes copied out of the memory may then
    /// be zeroes of this process.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.memory().is_some_and(|memory| memory.is_poisoned())
    }

    /// The uncompleted pieces, for the kernel. The pointers are valid while this value exists and is neither refilled
    /// nor released.
    #[inline]
    #[must_use]
    pub fn as_raw(&self) -> &[libc::iovec] {
        self.pieces.as_ref().map_or(&[], |pieces| &pieces.vecs[pieces.first..pieces.count])
    }

    /// Whether every remaining piece starts at a multiple of `memory_bytes` and has a length that is a
    /// multiple of `length_bytes`, as O_DIRECT requires. Both are powers of two.
    #[inline]
    #[must_use]
    pub fn is_aligned(&self, memory_bytes: u32, length_bytes: u32) -> bool {
        let mask_of = |align: u32| align as usize - 1;
        let (start, length) = (mask_of(memory_bytes), mask_of(length_bytes));
        self.as_raw().iter().all(|v| v.iov_base as usize & start == 0 && v.iov_len & length == 0)
    }

    /// Drops the first `bytes` remaining bytes as completed.
    ///
    /// # Panics
    /// If `bytes` is more than remains.
    #[inline]
    pub fn advance(&mut self, bytes: u64) {
        assert!(bytes <= self.remaining_bytes(), "advanced past the end of the buffers");
        if let Some(pieces) = &mut self.pieces {
            pieces.advance(bytes);
        }
    }

    /// Records a store into all the buffers, completed or not, because the kernel (or another writer) filled them or
    /// started to. The store is recorded in the log of `memory`, which is the buffers' own memory or a later one that
    /// still has their regions.
    #[inline]
    pub fn note_filled(&self, memory: &GuestMemory) {
        if memory.logs_stores() {
            self.log_filled(memory);
        }
    }

    #[cold]
    fn log_filled(&self, memory: &GuestMemory) {
        let Some(pieces) = &self.pieces else { return };
        // Most buffers are in the same region as the previous one.
        let mut last = None;
        for (at, piece) in pieces.vecs[..pieces.count].iter().enumerate() {
            let cut = if at == pieces.first { pieces.cut } else { 0 };
            let host = piece.iov_base as usize - cut;
            let mut regions = last.into_iter().chain(memory.regions());
            let found = regions.find_map(|region| Some((region, region.guest_of(host)?)));
            if let Some((region, addr)) = found {
                last = Some(region);
                memory.note_store(addr, (piece.iov_len + cut) as u64);
            }
        }
    }

    /// Copies the first remaining bytes into `out`; returns the number of bytes copied.
    pub fn copy_out(&self, out: &mut [u8]) -> usize {
        self.for_each_copy(out.len(), |volatile, at| {
            volatile.copy_to(&mut out[at..at + volatile.len()]);
        })
    }

    /// Copies `bytes` over the first remaining bytes; returns how many fitted. The owner of the request
    /// records the store with [`IoVecs::note_filled`], as for stores by the kernel.
    pub fn copy_in(&self, bytes: &[u8]) -> usize {
        self.for_each_copy(bytes.len(), |volatile, at| {
            volatile.copy_from(&bytes[at..at + volatile.len()]);
        })
    }

    fn for_each_copy(&self, limit: usize, mut copy: impl FnMut(VolatileSlice<'_>, usize)) -> usize {
        let mut done = 0;
        for piece in self.as_raw() {
            let length = piece.iov_len.min(limit - done);
            // SAFETY: 1. `fill` took the piece from memory that `Pieces::memory` keeps mapped;
            // 2. only volatile accesses, and the slice does not outlive the call.
            let volatile = unsafe { VolatileSlice::new(piece.iov_base.cast(), length) };
            copy(volatile, done);
            done += length;
        }
        done
    }
}

impl Pieces {
    fn fill(
        &mut self,
        view: &MemoryView,
        ranges: impl IntoIterator<Item = GuestRange>,
    ) -> Result<(), FillError> {
        for range in ranges {
            match (view.host_of(range), self.vecs.get_mut(self.count)) {
                (Some(host), Some(next)) => {
                    let iov_len = range.len_bytes as usize;
                    *next = libc::iovec { iov_base: host.as_ptr().cast(), iov_len };
                    self.count += 1;
                    self.remaining_bytes += u64::from(range.len_bytes);
                }
                _ => self.fill_parts(view, range)?,
            }
        }
        Ok(())
    }

    /// Slow path: the range crosses regions, is not fully mapped, or finds no free piece.
    #[cold]
    fn fill_parts(&mut self, view: &MemoryView, range: GuestRange) -> Result<(), FillError> {
        let mut full = false;
        view.for_each_part(range, |host, part_bytes| match self.vecs.get_mut(self.count) {
            Some(next) => {
                #[allow(clippy::cast_possible_truncation)] // a part fits the mapping, hence `usize`
                let iov_len = part_bytes as usize;
                *next = libc::iovec { iov_base: host.as_ptr().cast(), iov_len };
                self.count += 1;
                self.remaining_bytes += part_bytes;
            }
            None => full = true,
        })?;
        if full { Err(FillError::Full { capacity: self.vecs.len() }) } else { Ok(()) }
    }

    #[inline]
    fn hold(&mut self, memory: &Arc<GuestMemory>) {
        let held = self.memory.as_ref().is_some_and(|held| Arc::ptr_eq(held, memory));
        if !held {
            self.memory = Some(Arc::clone(memory));
        }
    }

    #[inline]
    fn clear(&mut self) {
        (self.count, self.first, self.cut) = (0, 0, 0);
        self.remaining_bytes = 0;
    }

    /// The caller ensures that `bytes` is at most `remaining_bytes`.
    #[inline]
    fn advance(&mut self, bytes: u64) {
        self.remaining_bytes -= bytes;
        if self.cut == 0 && self.remaining_bytes == 0 {
            self.first = self.count;
            return;
        }
        let mut left = bytes;
        while let Some(piece) = self.vecs[..self.count].get_mut(self.first) {
            let piece_bytes = piece.iov_len as u64;
            if left < piece_bytes {
                #[allow(clippy::cast_possible_truncation)] // less than `iov_len`
                let step = left as usize;
                piece.iov_base = piece.iov_base.wrapping_byte_add(step);
                piece.iov_len -= step;
                self.cut += step;
                return;
            }
            piece.iov_base = piece.iov_base.wrapping_byte_sub(self.cut);
            piece.iov_len += std::mem::take(&mut self.cut);
            left -= piece_bytes;
            self.first += 1;
        }
    }
}

impl fmt::Debug for IoVecs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pieces, remaining_bytes) = (self.as_raw().len(), self.remaining_bytes());
        f.debug_struct("IoVecs").field("pieces", &pieces).field("remaining_bytes", &remaining_bytes).finish()
    }
}
