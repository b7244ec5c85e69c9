//! Memory of this engine into which the inner engine reads, and from which it writes.

use std::io;
use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};

/// Buffers of equal length. The kernel provides their pages on the first write.
pub(super) struct Scratch {
    view: MemoryView,
    buffer_bytes: u64,
}

impl Scratch {
    /// `buffer_bytes` is a multiple of the largest alignment that a file may need.
    pub fn new(buffers: u64, buffer_bytes: u64) -> io::Result<Self> {
        let region = Region::from_memfd(GuestAddress(0), buffers * buffer_bytes).map_err(io::Error::other)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        Ok(Self { view: MemoryView::new(Arc::new(memory)), buffer_bytes })
    }

    /// Makes `buffers` describe the beginning of a buffer.
    pub fn describe(&self, index: usize, len_bytes: u64, buffers: &mut IoVecs) {
        assert!(len_bytes <= self.buffer_bytes, "{len_bytes} bytes in a buffer of {}", self.buffer_bytes);
        let addr = index as u64 * self.buffer_bytes;
        let len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        let filled = buffers.fill(&self.view, [GuestRange { addr, len_bytes }]);
        assert!(filled.is_ok(), "scratch memory is one region: {filled:?}");
    }

    /// Copies to the beginning of a buffer.
    pub fn write(&self, index: usize, bytes: &[u8]) {
        assert!(bytes.len() as u64 <= self.buffer_bytes, "{} bytes in a buffer", bytes.len());
        let stored = self.view.store(index as u64 * self.buffer_bytes, bytes);
        assert!(stored.is_ok(), "scratch memory is one region: {stored:?}");
    }

    /// Copies from a buffer. What the file did not have, from `valid_bytes` on, is zeroes.
    pub fn read(&self, index: usize, at_bytes: u64, valid_bytes: u64, out: &mut [u8]) {
        let there = valid_bytes.saturating_sub(at_bytes);
        let there = usize::try_from(there).unwrap_or(usize::MAX).min(out.len());
        let (found, past) = out.split_at_mut(there);
        past.fill(0);
        let read = self.view.read(index as u64 * self.buffer_bytes + at_bytes, found);
        assert!(read.is_ok(), "scratch memory is one region: {read:?}");
    }
}
