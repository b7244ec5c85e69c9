//! One descriptor chain, walked and checked: the buffers of a request.
//!
//! - A chain's memory is allocated once, with the queue's size, and reused for every request.
//! - Device-readable buffers come first, then the device-writable ones (virtio 1.3 §2.7.4.2).
//! - Zero-length descriptors are legal and are dropped.
//! - Addresses are not checked here; an unmapped address causes an error when the buffer is used.

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

/// One descriptor, copied out of guest memory (virtio 1.3 §2.7.5). A packed ring's buffer id is not included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub range: GuestRange,
    pub flags: u16,
    pub next: u16,
}

impl Descriptor {
    /// `meta`: length, flags and next, in the layout of the second word of a split ring's descriptor.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // extracts fields
    pub fn from_words(addr: u64, meta: u64) -> Self {
        let range = GuestRange { addr, len_bytes: meta as u32 };
        Self { range, flags: (meta >> 32) as u16, next: (meta >> 48) as u16 }
    }

    /// The inverse of [`Descriptor::from_words`].
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
    /// The token that was passed to `add`.
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
    /// Number of device-readable buffers, which come first.
    readable: usize,
    readable_bytes: u64,
    writable_bytes: u64,
}

impl Chain {
    /// Allocates room for the longest chain of a queue with `queue_size` entries.
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

    /// Removes all buffers.
    #[inline]
    pub fn clear(&mut self) {
        (self.count, self.readable) = (0, 0);
        (self.readable_bytes, self.writable_bytes) = (0, 0);
    }

    /// Fills the chain if it is *plain*, as most are: all buffers are in one table and in order, and none is
    /// empty.
    ///
    /// `read` returns the two words of the descriptor at an index, or `None` if the table has no such descriptor. The
    /// chain starts at `index` and has at most `limit` descriptors.
    ///
    /// # Errors
    /// [`Stopped`] if the chain is not plain or has a fault; a [`Walk`] can continue from that position.
    #[inline(always)] // keeps the fields that the closure reads in registers
    pub(crate) fn read_plain(
        &mut self,
        mut index: u16,
        limit: u16,
        mut read: impl FnMut(u16) -> Option<[u64; 2]>,
    ) -> Result<(), Stopped> {
        self.clear();
        let (mut count, mut bytes) = (0, 0);
        let mut readable = None;
        let most = self.ranges.len().min(usize::from(limit));
        for slot in &mut self.ranges[..most] {
            let Some([addr, meta]) = read(index) else { break };
            let descriptor = Descriptor::from_words(addr, meta);
            let Descriptor { range, flags, next } = descriptor;
            if range.len_bytes == 0 || flags & INDIRECT != 0 {
                return Err(Stopped { at: At::Read(descriptor), count, bytes, readable });
            }
            match readable {
                None if flags & WRITE != 0 => readable = Some((count, bytes)),
                Some(_) if flags & WRITE == 0 => {
                    return Err(Stopped { at: At::Read(descriptor), count, bytes, readable });
                }
                _ => (),
            }
            *slot = range;
            count += 1;
            bytes += u64::from(range.len_bytes);
            if flags & NEXT == 0 {
                let (readable, readable_bytes) = readable.unwrap_or((count, bytes));
                (self.count, self.readable) = (count, readable);
                (self.readable_bytes, self.writable_bytes) = (readable_bytes, bytes - readable_bytes);
                return Ok(());
            }
            index = next;
        }
        Err(Stopped { at: At::Unread(index), count, bytes, readable })
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

/// The position in a ring or table where [`Chain::read_plain`] stopped. The [`Walk`] does not reread any descriptor,
/// because the driver may have changed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopped {
    pub at: At,
    /// Number of descriptors before this position; all of them are plain.
    count: usize,
    /// Total bytes of their buffers.
    bytes: u64,
    /// Number and bytes of the device-readable buffers among them; `None` if all are readable.
    readable: Option<(usize, u64)>,
}

/// The next descriptor of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) enum At {
    /// The descriptor was read and is not plain.
    Read(Descriptor),
    /// The descriptor was not read; this is its index, which may be outside the table.
    Unread(u16),
}

impl Stopped {
    /// Nothing was read; the first descriptor has index 0.
    pub const AT_START: Self = Self { at: At::Unread(0), count: 0, bytes: 0, readable: None };

    /// Number of descriptors before this position.
    #[allow(clippy::cast_possible_truncation)] // at most `read_plain`'s limit
    pub fn taken(&self) -> u16 {
        self.count as u16
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
        Self::resume(chain, &Stopped::AT_START)
    }

    /// Continues where [`Chain::read_plain`] stopped. The buffers before that position are already in `chain`.
    pub fn resume(chain: &'c mut Chain, stopped: &Stopped) -> Self {
        let &Stopped { count, bytes, readable, .. } = stopped;
        let (readable_count, readable_bytes) = readable.unwrap_or((count, bytes));
        Self {
            chain,
            count,
            readable: readable_count,
            readable_bytes,
            writable_bytes: bytes - readable_bytes,
            seen_writable: readable.is_some(),
            in_order: true,
        }
    }

    /// Reads the rest of a chain that is linked by `next`, from `at` on. `taken` descriptors precede `at`, and the
    /// chain may have at most `limit`. Stops at a descriptor that refers to an indirect table, and returns that
    /// descriptor with the number of descriptors before it.
    ///
    /// # Errors
    /// [`ChainFault::NextOutOfRange`], [`ChainFault::TooLong`], or what `read` returns.
    pub fn follow(
        &mut self,
        mut at: At,
        mut taken: u16,
        (table_entries, limit): (u16, u16),
        read: impl Fn(u16) -> Result<[u64; 2], ChainFault>,
    ) -> Result<Option<(Descriptor, u16)>, ChainFault> {
        loop {
            let descriptor = match at {
                At::Read(descriptor) => descriptor,
                At::Unread(next) if next >= table_entries => {
                    return Err(ChainFault::NextOutOfRange { next, table_entries });
                }
                At::Unread(_) if taken == limit => return Err(ChainFault::TooLong { limit }),
                At::Unread(index) => {
                    let [addr, meta] = read(index)?;
                    Descriptor::from_words(addr, meta)
                }
            };
            if descriptor.has(INDIRECT) {
                return Ok(Some((descriptor, taken)));
            }
            self.push(&descriptor);
            if !descriptor.has(NEXT) {
                return Ok(None);
            }
            (at, taken) = (At::Unread(descriptor.next), taken + 1);
        }
    }

    /// Appends a buffer, unless it is empty or is a readable buffer after a writable one.
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

    /// Fills the chain. Leaves out readable buffers after a writable one, which are an error.
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const WRITABLE: u16 = WRITE | NEXT;

    /// The result with the number of descriptors before an indirect table; how often each descriptor was read; and the
    /// lengths of the readable and of the writable buffers.
    type Outcome = (Result<Option<u16>, ChainFault>, Vec<u32>, [Vec<u32>; 2]);

    /// Reads a table whose descriptors have these lengths and flags, in order.
    fn read(descriptors: &[(u32, u16)], limit: u16) -> Outcome {
        let entries = u16::try_from(descriptors.len()).unwrap();
        let reads = RefCell::new(vec![0; descriptors.len()]);
        let words = |index: u16| {
            let &(len_bytes, flags) = descriptors.get(usize::from(index))?;
            reads.borrow_mut()[usize::from(index)] += 1;
            let (addr, meta) =
                Descriptor { range: GuestRange { addr: 0, len_bytes }, flags, next: index + 1 }.to_words();
            Some([addr, meta])
        };
        let mut chain = Chain::with_capacity(16);
        let result = chain.read_plain(0, limit, words).map(|()| None).or_else(|stopped| {
            let mut walk = Walk::resume(&mut chain, &stopped);
            let read = |index| Ok(words(index).unwrap());
            match walk.follow(stopped.at, stopped.taken(), (entries, limit), read)? {
                Some((_, before)) => Ok(Some(before)),
                None => walk.finish().map(|()| None),
            }
        });
        let lengths = |ranges: &[GuestRange]| ranges.iter().map(|range| range.len_bytes).collect();
        let buffers = [lengths(chain.readable()), lengths(chain.writable())];
        (result, reads.into_inner(), buffers)
    }

    #[test]
    fn each_descriptor_is_read_once_wherever_the_chain_stops_being_plain() {
        let chains: [&[(u32, u16)]; 4] = [
            &[(16, NEXT), (512, WRITABLE), (1, WRITE)],
            &[(0, NEXT), (16, NEXT), (512, WRITABLE), (1, WRITE)],
            &[(16, NEXT), (512, WRITABLE), (0, WRITABLE), (1, WRITE)],
            &[(16, NEXT), (512, WRITABLE), (1, WRITABLE), (0, WRITE)],
        ];
        for descriptors in chains {
            let (result, reads, buffers) = read(descriptors, 16);
            assert_eq!((result, buffers), (Ok(None), [vec![16], vec![512, 1]]), "{descriptors:?}");
            assert!(reads.iter().all(|&reads| reads == 1), "{descriptors:?}: {reads:?}");
        }
    }

    #[test]
    fn readable_buffer_after_a_writable_one_is_left_out_and_read_once() {
        let (result, reads, buffers) = read(&[(16, NEXT), (1, WRITABLE), (8, NEXT), (2, WRITE)], 16);
        assert_eq!(result, Err(ChainFault::ReadableAfterWritable));
        assert_eq!((reads, buffers), (vec![1; 4], [vec![16], vec![1, 2]]));
    }

    #[test]
    fn table_after_other_descriptors_is_found_with_their_number() {
        let (result, reads, _) = read(&[(16, NEXT), (0, NEXT), (32, INDIRECT)], 16);
        assert_eq!((result, reads), (Ok(Some(2)), vec![1; 3]));
    }

    #[test]
    fn chain_that_leaves_its_table_or_is_too_long_is_a_fault() {
        let left = || Err(ChainFault::NextOutOfRange { next: 2, table_entries: 2 });
        assert_eq!(read(&[(16, NEXT), (16, NEXT)], 16).0, left());
        assert_eq!(read(&[(16, NEXT), (0, NEXT)], 16).0, left());
        assert_eq!(read(&[(16, NEXT); 4], 3).0, Err(ChainFault::TooLong { limit: 3 }));
        assert_eq!(read(&[(0, NEXT); 4], 3).0, Err(ChainFault::TooLong { limit: 3 }));
    }
}
