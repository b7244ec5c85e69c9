//! The data buffers of one request: guest memory as the kernel's `iovec`s, and what keeps it mapped.
//!
//! The pointers are only good while the regions behind them stay mapped, so each `IoVecs` holds the
//! [`GuestMemory`] it was filled from, and an engine owns the `IoVecs` while the kernel uses it. The
//! hold is kept from one request to the next: refilling from the same memory costs no atomic.
//!
//! - Capacity is fixed when it is made; nothing is allocated per request.
//! - One pointer wide: it goes through six hands between ring and completion, and a larger value is read by
//!   each before the last one's narrower stores have left the processor's store buffer.
//! - [`IoVecs::advance`] drops what is done, so that a short transfer can be resumed.
//!
//! Not here: pools of these (`blk_server`), bounce buffers (`io_engine`).

use std::fmt;
use std::sync::Arc;

use vm_memory::VolatileSlice;

use crate::memory::{AccessError, GuestMemory, GuestRange, MemoryView};

/// Why buffers cannot be described.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FillError {
    /// Part of a buffer lies outside the guest's memory.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// More pieces than this value can hold: a larger one is needed.
    #[error("buffers need more than {capacity} pieces")]
    Full {
        /** In pieces. */
        capacity: usize,
    },
}

/// Buffers of one request, in order. By default there is room for none, and nothing allocated.
#[derive(Default)]
pub struct IoVecs {
    /// `None`: no capacity, no memory.
    pieces: Option<Box<Pieces>>,
}

#[derive(Default)]
struct Pieces {
    memory: Option<Arc<GuestMemory>>,
    vecs: Vec<libc::iovec>,
    /// Pieces before this one are done, and as they were filled.
    first: usize,
    /// Bytes that are done of that one, and missing at its start.
    cut: usize,
    remaining_bytes: u64,
}

// SAFETY: 1. the pointers lead into mappings that `memory` keeps alive, on any thread;
// 2. they are only used by the kernel and by volatile copies.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// Room for `capacity` pieces. Without any, nothing is allocated.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        let pieces = || Box::new(Pieces { vecs: Vec::with_capacity(capacity), ..Pieces::default() });
        Self { pieces: (capacity > 0).then(pieces) }
    }

    /// In pieces.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pieces.as_ref().map_or(0, |pieces| pieces.vecs.capacity())
    }

    /// Bytes not yet done.
    #[inline]
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.pieces.as_ref().map_or(0, |pieces| pieces.remaining_bytes)
    }

    /// Describes `ranges` of `view`'s memory, replacing what was here.
    ///
    /// # Errors
    /// [`FillError`]; the value is empty then.
    #[inline]
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

    /// Forgets the buffers; the hold on the memory stays for the next request.
    #[inline]
    pub fn clear(&mut self) {
        if let Some(pieces) = &mut self.pieces {
            pieces.clear();
        }
    }

    /// Forgets the buffers and lets go of the memory.
    pub fn release(&mut self) {
        if let Some(pieces) = &mut self.pieces {
            pieces.clear();
            pieces.memory = None;
        }
    }

    /// What remains of these buffers, in pieces of its own: for an owner that keeps them longer than a request takes.
    #[must_use]
    pub fn take_rest(&mut self) -> Self {
        let Some(pieces) = &mut self.pieces else { return Self::default() };
        let vecs = pieces.vecs.get(pieces.first..).unwrap_or_default().to_vec();
        let rest = Pieces {
            memory: pieces.memory.clone(),
            first: 0,
            cut: 0,
            remaining_bytes: pieces.remaining_bytes,
            vecs,
        };
        pieces.clear();
        Self { pieces: Some(Box::new(rest)) }
    }

    /// The same guest addresses in `view`'s memory, which replaces the one that the buffers lie in.
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
        // Regions may be cut up anew: a piece can end at each of their ends.
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

    /// Whether `memory` is what the buffers lie in.
    #[inline]
    #[must_use]
    pub fn holds(&self, memory: &Arc<GuestMemory>) -> bool {
        self.memory().is_some_and(|held| Arc::ptr_eq(held, memory))
    }

    /// Whether a page of the memory is gone: what was copied out of it may be zeroes of our own.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.memory().is_some_and(|memory| memory.is_poisoned())
    }

    /// What is not yet done, for the kernel. The pointers are good while this value exists, is not
    /// refilled and not released.
    #[inline]
    #[must_use]
    pub fn as_raw(&self) -> &[libc::iovec] {
        self.pieces.as_ref().map_or(&[], |pieces| &pieces.vecs[pieces.first..])
    }

    /// Whether every remaining piece starts at a multiple of `memory_bytes` and has a length that is a
    /// multiple of `length_bytes`: what O_DIRECT asks for. Both are powers of two.
    #[inline]
    #[must_use]
    pub fn is_aligned(&self, memory_bytes: u32, length_bytes: u32) -> bool {
        let mask_of = |align: u32| align as usize - 1;
        let (start, length) = (mask_of(memory_bytes), mask_of(length_bytes));
        self.as_raw().iter().all(|v| v.iov_base as usize & start == 0 && v.iov_len & length == 0)
    }

    /// Drops the first `bytes` of what remains: they are done.
    ///
    /// # Panics
    /// If that is more than remains: the caller's mistake.
    #[inline]
    pub fn advance(&mut self, bytes: u64) {
        assert!(bytes <= self.remaining_bytes(), "advanced past the end of the buffers");
        if let Some(pieces) = &mut self.pieces {
            pieces.advance(bytes);
        }
    }

    /// Notes a store into all the buffers, done or not: somebody else (the kernel) filled them, or began to. Where is
    /// noted is up to `memory`: theirs, or one that took its place since and still has their regions.
    pub fn note_filled(&self, memory: &GuestMemory) {
        let Some(pieces) = self.pieces.as_ref().filter(|_| memory.logs_stores()) else { return };
        // Most buffers lie in the region of the one before.
        let mut last = None;
        for (at, piece) in pieces.vecs.iter().enumerate() {
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

    /// Copies the first bytes of what remains into `out`; returns how many there were.
    pub fn copy_out(&self, out: &mut [u8]) -> usize {
        self.for_each_copy(out.len(), |volatile, at| {
            volatile.copy_to(&mut out[at..at + volatile.len()]);
        })
    }

    /// Copies `bytes` over the first bytes of what remains; returns how many fitted. Whoever owns the request notes
    /// it, as what the kernel stores ([`IoVecs::note_filled`]).
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
    #[inline]
    fn fill(
        &mut self,
        view: &MemoryView,
        ranges: impl IntoIterator<Item = GuestRange>,
    ) -> Result<(), FillError> {
        let capacity = self.vecs.capacity();
        let mut full = false;
        for range in ranges {
            view.for_each_part(range, |host, part_bytes| {
                full |= self.vecs.len() == capacity;
                if !full {
                    #[allow(clippy::cast_possible_truncation)] // a part fits the mapping, hence `usize`
                    let iov_len = part_bytes as usize;
                    self.vecs.push(libc::iovec { iov_base: host.as_ptr().cast(), iov_len });
                    self.remaining_bytes += part_bytes;
                }
            })?;
            if full {
                return Err(FillError::Full { capacity });
            }
        }
        Ok(())
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
        self.vecs.clear();
        (self.first, self.cut) = (0, 0);
        self.remaining_bytes = 0;
    }

    /// At most `remaining_bytes`, says the caller.
    #[inline]
    fn advance(&mut self, bytes: u64) {
        self.remaining_bytes -= bytes;
        if self.cut == 0 && self.remaining_bytes == 0 {
            self.first = self.vecs.len();
            return;
        }
        let mut left = bytes;
        while let Some(piece) = self.vecs.get_mut(self.first) {
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
