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
    /// The token that was given to `add`.
    pub token: u64,
    /// The tag that `add` returned; it may be reused now.
    pub tag: u16,
    /// Bytes that the device stored, from the start of the writable buffers.
    pub written_bytes: u32,
}

/// The buffers of one request.
#[derive(Debug)]
pub struct Chain {
    /// Only the first `count` belong to the request.
    ranges: Vec<GuestRange>,
    count: usize,
    /// How many of them are device-readable.
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Chain {
    /// Room for the longest chain of a queue with `queue_size` entries.
    #[must_use]
    pub fn with_capacity(queue_size: u16) -> Self {
        let ranges = vec![GuestRange::default(); usize::from(queue_size)];
        Self { ranges, count: 0, readable: 0, readable_bytes: 0, writable_bytes: 0 }
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
        &self.ranges[self.readable..self.count]
    }

    /// Number of buffers.
    #[inline]
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
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
        (self.count, self.readable) = (0, 0);
        (self.readable_bytes, self.writable_bytes) = (0, 0);
    }

    /// Fills the chain if it is like most: all buffers are in one table and in order, and none is empty. Otherwise
    /// returns false, and the caller reads the chain again with a [`Walk`], which finds the fault if there is one.
    ///
    /// `read` returns the words of the descriptor with this index, or `None` if the table has none. The first one has
    /// index `index`, and the chain has at most `limit`.
    #[inline(always)] // the closure reads fields that then stay in registers
    pub(crate) fn read_plain(
        &mut self,
        mut index: u16,
        limit: u16,
        mut read: impl FnMut(u16) -> Option<[u64; 2]>,
    ) -> bool {
        self.clear();
        let (mut count, mut bytes) = (0, 0);
        let mut readable = None;
        for slot in self.ranges.iter_mut().take(usize::from(limit)) {
            let Some([addr, meta]) = read(index) else { return false };
            let Descriptor { range, flags, next } = Descriptor::from_words(addr, meta);
            if range.len_bytes == 0 || flags & INDIRECT != 0 {
                return false;
            }
            match readable {
                None if flags & WRITE != 0 => readable = Some((count, bytes)),
                Some(_) if flags & WRITE == 0 => return false,
                _ => (),
            }
            *slot = range;
            count += 1;
            bytes += u64::from(range.len_bytes);
            if flags & NEXT == 0 {
                let (readable, readable_bytes) = readable.unwrap_or((count, bytes));
                (self.count, self.readable) = (count, readable);
                (self.readable_bytes, self.writable_bytes) = (readable_bytes, bytes - readable_bytes);
                return true;
            }
            index = next;
        }
        false
    }

    /// Replaces the buffers, for callers that build chains without a ring. Drops empty buffers.
    pub fn set(&mut self, readable: &[GuestRange], writable: &[GuestRange]) {
        let mut walk = Walk::start(self);
        let descriptor = |range, flags| Descriptor { range, flags, next: 0 };
        readable.iter().for_each(|&range| walk.push(&descriptor(range, 0)));
        writable.iter().for_each(|&range| walk.push(&descriptor(range, WRITE)));
        let in_order = walk.finish();
        debug_assert!(in_order.is_ok(), "the writable buffers come last");
    }
}

/// A chain that is being read from a ring. The chain is empty until [`Walk::finish`].
pub(crate) struct Walk<'c> {
    chain: &'c mut Chain,
    count: usize,
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
    seen_writable: bool,
    in_order: bool,
}

impl<'c> Walk<'c> {
    pub fn start(chain: &'c mut Chain) -> Self {
        chain.clear();
        Self {
            chain,
            count: 0,
            readable: 0,
            readable_bytes: 0,
            writable_bytes: 0,
            seen_writable: false,
            in_order: true,
        }
    }

    /// Appends a buffer, unless it is empty, or readable after a writable one.
    pub fn push(&mut self, descriptor: &Descriptor) {
        let bytes = u64::from(descriptor.range.len_bytes);
        if descriptor.has(WRITE) {
            self.seen_writable = true;
            self.writable_bytes += bytes;
        } else if self.seen_writable {
            self.in_order = false;
            return;
        } else {
            self.readable += usize::from(bytes != 0);
            self.readable_bytes += bytes;
        }
        if bytes != 0 {
            match self.chain.ranges.get_mut(self.count) {
                Some(next) => *next = descriptor.range,
                None => self.chain.ranges.push(descriptor.range),
            }
            self.count += 1;
        }
    }

    /// Fills the chain. With a readable buffer after a writable one, the chain has the others.
    ///
    /// # Errors
    /// [`ChainFault::ReadableAfterWritable`].
    pub fn finish(self) -> Result<(), ChainFault> {
        let Self { chain, count, readable, readable_bytes, writable_bytes, .. } = self;
        (chain.count, chain.readable) = (count, readable);
        (chain.readable_bytes, chain.writable_bytes) = (readable_bytes, writable_bytes);
        if self.in_order { Ok(()) } else { Err(ChainFault::ReadableAfterWritable) }
    }
}
