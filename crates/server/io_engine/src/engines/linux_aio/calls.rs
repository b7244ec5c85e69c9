//! Control blocks, one for each call from `queue` to its result, made once.
//!
//! `push → pending (in order) → given to the kernel → release`
//!
//! The kernel needs a block only until `io_submit` has returned, but names the call by its address, so a
//! block is not used for another call before that.
//!
//! Not here: the system calls (`context.rs`).

use std::cell::UnsafeCell;

use super::context::Iocb;

#[derive(Debug)]
pub(super) struct Calls {
    blocks: Box<[UnsafeCell<Iocb>]>,
    free: Vec<u32>,
    /// What `io_submit` takes: pointers to blocks, of which the first `given` were taken.
    pending: Vec<*mut Iocb>,
    given: usize,
}

// SAFETY: 1. the pointers are to `blocks`, which moves along with them, and whose contents do not move.
unsafe impl Send for Calls {}

impl Calls {
    pub fn new(count: u32) -> Self {
        Self {
            blocks: (0..count).map(|_| UnsafeCell::default()).collect(),
            free: (0..count).rev().collect(),
            pending: Vec::with_capacity(count as usize),
            given: 0,
        }
    }

    /// Takes a call; false: there is no free block.
    #[inline]
    pub fn push(&mut self, call: Iocb) -> bool {
        let Some(index) = self.free.pop() else { return false };
        let block = self.blocks[index as usize].get();
        // SAFETY: 1. a block of ours that was free: neither we nor the kernel look at it.
        unsafe { block.write(call) };
        if self.pending.len() == self.pending.capacity() {
            self.pending.drain(..self.given);
            self.given = 0;
        }
        self.pending.push(block);
        true
    }

    /// Those that the kernel has not taken, in order.
    #[inline]
    pub fn pending(&self) -> &[*mut Iocb] {
        &self.pending[self.given..]
    }

    /// The kernel has taken the first `count`.
    #[inline]
    pub fn give(&mut self, count: usize) {
        self.given += count;
        if self.given == self.pending.len() {
            self.pending.clear();
            self.given = 0;
        }
    }

    /// Takes the first pending call back.
    pub fn take_first(&mut self) -> Option<Iocb> {
        let block = *self.pending().first()?;
        self.give(1);
        Some(self.take_back(block))
    }

    /// Takes the pending call with this name back.
    pub fn take_pending(&mut self, data: u64) -> Option<Iocb> {
        let has_name = |block: &*mut Iocb| {
            // SAFETY: 1. a block of ours, which only `&mut self` changes.
            let call = unsafe { block.read() };
            call.data == data
        };
        let place = self.pending().iter().position(has_name)?;
        let block = self.pending.remove(self.given + place);
        self.give(0);
        Some(self.take_back(block))
    }

    fn take_back(&mut self, block: *mut Iocb) -> Iocb {
        // SAFETY: 1. a block of ours, which the kernel has not taken.
        let call = unsafe { block.read() };
        self.release(block.addr() as u64);
        call
    }

    /// The call whose block is at this address has ended.
    #[inline]
    pub fn release(&mut self, address: u64) {
        let offset_bytes = address.wrapping_sub(self.blocks.as_ptr().addr() as u64);
        let index = offset_bytes / size_of::<Iocb>() as u64;
        debug_assert!(index < self.blocks.len() as u64, "a result of somebody else's call");
        if let Some(index) = u32::try_from(index).ok().filter(|index| (*index as usize) < self.blocks.len()) {
            self.free.push(index);
        }
    }

    /// Blocks that `push` finds.
    #[inline]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Calls that the kernel has taken and not ended.
    pub fn in_kernel(&self) -> usize {
        self.blocks.len() - self.free.len() - self.pending().len()
    }

    /// Leaves the blocks to the end of the process.
    pub fn abandon(&mut self) {
        self.pending.clear();
        self.given = 0;
        std::mem::forget(std::mem::take(&mut self.blocks));
    }
}
