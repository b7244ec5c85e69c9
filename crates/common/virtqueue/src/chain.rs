//! One descriptor chain, walked and checked: the buffers of a request.
//!
//! - Reused for every request: allocated once with the queue's size, then never again.
//! - Device-readable buffers come first, then the device-writable ones (virtio 1.3 §2.7.4.2).
//! - Zero-length descriptors are legal and are dropped.
//! - Addresses are not checked here; an unmapped one fails when the buffer is used.

use guest_mem::GuestRange;

use crate::fault::ChainFault;

/// Continues at `next`.
pub(crate) const NEXT: u16 = 1;
/// Device-writable.
pub(crate) const WRITE: u16 = 2;
/// Refers to an indirect table.
pub(crate) const INDIRECT: u16 = 4;

/// Size of one descriptor in memory (virtio 1.3 §2.7.5).
pub(crate) const DESCRIPTOR_BYTES: u32 = 16;

/// One descriptor, copied out of guest memory (virtio 1.3 §2.7.5); a packed ring's without its id.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub range: GuestRange,
    pub flags: u16,
    pub next: u16,
}

impl Descriptor {
    /// `meta`: length, flags and next, in the layout of the second word of a split ring's descriptor.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // takes the fields apart
    pub fn from_words(addr: u64, meta: u64) -> Self {
        let range = GuestRange { addr, len_bytes: meta as u32 };
        Self { range, flags: (meta >> 32) as u16, next: (meta >> 48) as u16 }
    }

    /// The descriptor as these two words.
    #[inline]
    pub fn to_words(self) -> (u64, u64) {
        let meta = u64::from(self.range.len_bytes) | u64::from(self.flags) << 32 | u64::from(self.next) << 48;
        (self.range.addr, meta)
    }

    #[inline]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// A chain that the device returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// As given to `add`.
    pub token: u64,
    /// As returned by `add`; free for reuse.
    pub tag: u16,
    /// Bytes that the device stored, from the start of the writable buffers.
    pub written_bytes: u32,
}

/// The buffers of one request.
#[derive(Debug)]
pub struct Chain {
    ranges: Vec<GuestRange>,
    /// How many of `ranges` are device-readable.
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    seen_writable: bool,
}

impl Chain {
    /// Room for the longest chain of a queue with `queue_size` entries.
    #[must_use]
    pub fn with_capacity(queue_size: u16) -> Self {
        let ranges = Vec::with_capacity(usize::from(queue_size));
        Self { ranges, readable: 0, readable_bytes: 0, writable_bytes: 0, seen_writable: false }
    }

    /// Device-readable buffers, in order; none is empty.
    #[inline]
    #[must_use]
    pub fn readable(&self) -> &[GuestRange] {
        &self.ranges[..self.readable]
    }

    /// Device-writable buffers, in order; none is empty.
    #[inline]
    #[must_use]
    pub fn writable(&self) -> &[GuestRange] {
        &self.ranges[self.readable..]
    }

    /// Total bytes of [`Chain::readable`].
    #[inline]
    #[must_use]
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Total bytes of [`Chain::writable`].
    #[inline]
    #[must_use]
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// Forgets the buffers.
    #[inline]
    pub fn clear(&mut self) {
        self.ranges.clear();
        (self.readable, self.readable_bytes, self.writable_bytes) = (0, 0, 0);
        self.seen_writable = false;
    }

    /// Appends a device-readable buffer; for callers that build chains without a ring.
    ///
    /// # Errors
    /// [`ChainFault::ReadableAfterWritable`].
    #[inline]
    pub fn push_readable(&mut self, range: GuestRange) -> Result<(), ChainFault> {
        if self.seen_writable {
            return Err(ChainFault::ReadableAfterWritable);
        }
        if range.len_bytes != 0 {
            self.ranges.push(range);
            self.readable += 1;
            self.readable_bytes += u64::from(range.len_bytes);
        }
        Ok(())
    }

    /// Appends a device-writable buffer.
    #[inline]
    pub fn push_writable(&mut self, range: GuestRange) {
        self.seen_writable = true;
        if range.len_bytes != 0 {
            self.ranges.push(range);
            self.writable_bytes += u64::from(range.len_bytes);
        }
    }

    #[inline]
    pub(crate) fn push(&mut self, descriptor: Descriptor) -> Result<(), ChainFault> {
        if descriptor.has(WRITE) {
            self.push_writable(descriptor.range);
            Ok(())
        } else {
            self.push_readable(descriptor.range)
        }
    }
}
