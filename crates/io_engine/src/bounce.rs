//! Aligned memory of our own: bounce buffers for what `O_DIRECT` refuses, and zeroes to write.
//!
//! `misaligned write → copied out of guest memory → kernel`, `kernel → copied into guest memory ← misaligned read`
//!
//! - At most [`MAX_BUFFERS`] of [`BUFFER_BYTES`] per engine, each allocated when first needed, then kept.
//!   An op that finds none free waits its turn (`core.rs`); a longer request goes in several calls.
//!
//! Not here: deciding what is misaligned (`completion.rs`).

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Bounds what misaligned requests can cost: 2 MiB per engine.
pub(crate) const MAX_BUFFERS: usize = 8;
pub(crate) const BUFFER_BYTES: usize = 256 * 1024;
/// Zeroes written per call.
pub(crate) const ZEROES_BYTES: usize = 1024 * 1024;
/// At least what any device asks for: logical blocks end at 64 KiB (Linux 6.15).
const ALIGN_BYTES: usize = 64 * 1024;

/// Memory that starts out zeroed (and unbacked: pages appear when they are written).
#[derive(Debug)]
struct AlignedBuffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: 1. the memory belongs to this value alone; access goes through `&self` and `&mut self`.
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
        // SAFETY: 1. valid: allocated and zeroed with this length; 2. the kernel has no call on it that
        // writes: callers look at a buffer only when its call has a result.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.layout.size()) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and 3. `&mut self`: nobody else looks.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: 1. allocated with this layout; 2. no call is using it: the engine leaks it otherwise.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// A taken buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BounceId(u8);

#[derive(Debug, Default)]
pub(crate) struct Bounce {
    buffers: Vec<AlignedBuffer>,
    free: Vec<BounceId>,
    zeroes: Option<AlignedBuffer>,
}

impl Bounce {
    /// A free buffer, if there is one or one more may be made.
    pub fn take(&mut self) -> Option<BounceId> {
        if self.free.is_empty() && self.buffers.len() < MAX_BUFFERS {
            #[allow(clippy::cast_possible_truncation)] // below MAX_BUFFERS
            self.free.push(BounceId(self.buffers.len() as u8));
            self.buffers.push(AlignedBuffer::zeroed(BUFFER_BYTES));
        }
        self.free.pop()
    }

    pub fn give_back(&mut self, id: BounceId) {
        debug_assert!(!self.free.contains(&id));
        self.free.push(id);
    }

    pub fn base(&mut self, id: BounceId) -> *mut u8 {
        self.buffers[usize::from(id.0)].base.as_ptr()
    }

    pub fn bytes(&self, id: BounceId) -> &[u8] {
        self.buffers[usize::from(id.0)].as_slice()
    }

    pub fn bytes_mut(&mut self, id: BounceId) -> &mut [u8] {
        self.buffers[usize::from(id.0)].as_mut_slice()
    }

    /// [`ZEROES_BYTES`] of zeroes; only ever read, by any number of calls at a time.
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

    #[test]
    fn ninth_buffer_is_refused_until_one_comes_back() {
        let mut bounce = Bounce::default();
        let taken: Vec<_> = (0..MAX_BUFFERS).filter_map(|_| bounce.take()).collect();
        assert_eq!((taken.len(), bounce.take()), (MAX_BUFFERS, None));
        bounce.give_back(taken[3]);
        assert_eq!(bounce.take(), Some(taken[3]));
    }

    #[test]
    fn buffers_are_made_when_needed_and_kept() {
        let mut bounce = Bounce::default();
        let first = bounce.take().unwrap();
        bounce.give_back(first);
        assert_eq!(bounce.take(), Some(first));
        assert_eq!(bounce.made(), 1);
    }

    #[test]
    fn buffers_are_aligned_for_any_device() {
        let mut bounce = Bounce::default();
        let id = bounce.take().unwrap();
        assert_eq!(bounce.base(id).addr() % ALIGN_BYTES, 0);
        assert_eq!(bounce.zeroes().addr() % ALIGN_BYTES, 0);
    }
}
