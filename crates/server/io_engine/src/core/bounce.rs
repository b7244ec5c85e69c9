//! Aligned buffers: bounce buffers for data that `O_DIRECT` rejects, and zeroes for writing.
//!
//! `misaligned write → copied out of guest memory → kernel`, `kernel → copied into guest memory ← misaligned read`
//!
//! - An engine has [`MAX_BUFFERS`] of [`BUFFER_BYTES`]. With many files it has half as many plus one per file
//!   (`shares.rs`). Each is allocated on first use and then kept.
//! - An op that finds no free buffer waits until its own file's share has one (`waiting.rs`). A request longer than a
//!   buffer takes several calls.
//!
//! `op.rs` decides whether an op needs a bounce buffer.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::core::shares::Shares;
use crate::engine::FileId;

/// Limits the memory for misaligned requests: 2 MiB per engine, or 1 MiB plus 256 KiB per file if that is more.
pub(crate) const MAX_BUFFERS: u32 = 8;
/// Minimum number of buffers per file.
const LEAST_BUFFERS: u32 = 1;
pub(crate) const BUFFER_BYTES: usize = 256 * 1024;
/// Zeroes written per call.
pub(crate) const ZEROES_BYTES: usize = 512 * 1024;
/// The largest alignment that any device requires: logical blocks are at most 64 KiB (Linux 6.15).
const ALIGN_BYTES: usize = 64 * 1024;

/// Zeroed memory, whose pages the kernel allocates on the first write.
#[derive(Debug)]
struct AlignedBuffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: 1. this value owns the memory alone; access goes through `&self` and `&mut self`.
unsafe impl Send for AlignedBuffer {}

impl AlignedBuffer {
    fn zeroed(len_bytes: usize) -> Self {
        #[allow(clippy::expect_used)] // constants: a power of two, and far from overflow
        let layout = Layout::from_size_align(len_bytes, ALIGN_BYTES).expect("constant layout");
        // SAFETY: 1. the size is one of the constants above, not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, layout }
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: 1. valid: allocated and zeroed with this length; 2. no kernel call is writing to it: callers read a
        // buffer only after its call has completed.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.layout.size()) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and 3. `&mut self`: there is no other reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: 1. allocated with this layout; 2. no call is using it: the engine leaks it otherwise.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// A buffer that an op holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BounceId(u32);

#[derive(Debug)]
pub(crate) struct Bounce {
    buffers: Vec<AlignedBuffer>,
    free: Vec<BounceId>,
    zeroes: Option<AlignedBuffer>,
    pub shares: Shares,
}

impl Default for Bounce {
    fn default() -> Self {
        let shares = Shares::new(MAX_BUFFERS, LEAST_BUFFERS);
        Self { buffers: Vec::new(), free: Vec::new(), zeroes: None, shares }
    }
}

impl Bounce {
    /// Takes a buffer. Returns `None` if the file has used up its share.
    pub fn take(&mut self, file: FileId) -> Option<BounceId> {
        if !self.shares.take(file) {
            return None;
        }
        if self.free.is_empty() {
            #[allow(clippy::cast_possible_truncation)] // no more than there are shares
            self.free.push(BounceId(self.buffers.len() as u32));
            self.buffers.push(AlignedBuffer::zeroed(BUFFER_BYTES));
        }
        self.free.pop()
    }

    pub fn give_back(&mut self, id: BounceId, file: FileId) {
        debug_assert!(!self.free.contains(&id));
        self.free.push(id);
        self.shares.give_back(file);
    }

    pub fn base(&mut self, id: BounceId) -> *mut u8 {
        self.buffers[id.0 as usize].base.as_ptr()
    }

    pub fn bytes(&self, id: BounceId) -> &[u8] {
        self.buffers[id.0 as usize].as_slice()
    }

    pub fn bytes_mut(&mut self, id: BounceId) -> &mut [u8] {
        self.buffers[id.0 as usize].as_mut_slice()
    }

    /// [`ZEROES_BYTES`] of zeroes. Any number of calls may read them at once; no call writes them.
    pub fn zeroes(&mut self) -> *mut u8 {
        self.zeroes.get_or_insert_with(|| AlignedBuffer::zeroed(ZEROES_BYTES)).base.as_ptr()
    }

    #[cfg(test)]
    pub fn made(&self) -> usize {
        self.buffers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId(0);

    fn bounce() -> Bounce {
        let mut bounce = Bounce::default();
        bounce.shares.attach(FILE);
        bounce
    }

    #[test]
    fn ninth_buffer_is_refused_until_one_comes_back() {
        let mut bounce = bounce();
        let taken: Vec<_> = (0..MAX_BUFFERS).filter_map(|_| bounce.take(FILE)).collect();
        assert_eq!((taken.len(), bounce.take(FILE)), (MAX_BUFFERS as usize, None));
        bounce.give_back(taken[3], FILE);
        assert_eq!(bounce.take(FILE), Some(taken[3]));
    }

    #[test]
    fn file_that_keeps_its_buffers_leaves_some_to_each_other() {
        let mut bounce = bounce();
        (1..20).for_each(|file| bounce.shares.attach(FileId(file)));
        while bounce.take(FILE).is_some() {}
        assert!((1..20).all(|file| bounce.take(FileId(file)).is_some()));
    }

    #[test]
    fn buffers_are_made_when_needed_and_kept() {
        let mut bounce = bounce();
        let first = bounce.take(FILE).unwrap();
        bounce.give_back(first, FILE);
        assert_eq!(bounce.take(FILE), Some(first));
        assert_eq!(bounce.made(), 1);
    }

    #[test]
    fn buffers_are_aligned_for_any_device() {
        let mut bounce = bounce();
        let id = bounce.take(FILE).unwrap();
        assert_eq!(bounce.base(id).addr() % ALIGN_BYTES, 0);
        assert_eq!(bounce.zeroes().addr() % ALIGN_BYTES, 0);
    }
}
