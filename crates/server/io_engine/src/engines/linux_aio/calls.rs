//! Control blocks, allocated once. A call uses one from `queue` until its result arrives.
//!
//! `push → pending (in order) → submitted → release`
//!
//! The kernel reads a block only until `io_submit` returns, but identifies the call by the block's address. The block
//! therefore stays reserved until the call has ended.

use std::cell::UnsafeCell;

use super::context::Iocb;

#[derive(Debug)]
pub(super) struct Calls {
    blocks: Box<[UnsafeCell<Iocb>]>,
    free: Vec<u32>,
    /// The array for `io_submit`: pointers to blocks. The kernel has accepted the first `given` of them.
    pending: Vec<*mut Iocb>,
    given: usize,
}

// SAFETY: 1. the pointers refer to `blocks`, which moves along with them and whose contents do not move.
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

    /// Queues a call. Returns false if no block is free.
    #[inline]
    pub fn push(&mut self, call: Iocb) -> bool {
        let Some(index) = self.free.pop() else { return false };
        let block = self.blocks[index as usize].get();
        // SAFETY: 1. one of our blocks, and free: neither we nor the kernel use it.
        unsafe { block.write(call) };
        if self.pending.len() == self.pending.capacity() {
            self.pending.drain(..self.given);
            self.given = 0;
        }
        self.pending.push(block);
        true
    }

    /// Calls that the kernel has not accepted, in order.
    #[inline]
    pub fn pending(&self) -> &[*mut Iocb] {
        &self.pending[self.given..]
    }

    /// Records that the kernel has accepted the first `count` calls.
    #[inline]
    pub fn give(&mut self, count: usize) {
        self.given += count;
        if self.given == self.pending.len() {
            self.pending.clear();
            self.given = 0;
        }
    }

    /// Removes the first pending call.
    pub fn take_first(&mut self) -> Option<Iocb> {
        let block = *self.pending().first()?;
        self.give(1);
        Some(self.take_back(block))
    }

    /// Removes the pending call with this `data`.
    pub fn take_pending(&mut self, data: u64) -> Option<Iocb> {
        let has_name = |block: &*mut Iocb| {
            // SAFETY: 1. one of our blocks; only `&mut self` changes it.
            let call = unsafe { block.read() };
            call.data == data
        };
        let place = self.pending().iter().position(has_name)?;
        let block = self.pending.remove(self.given + place);
        self.give(0);
        Some(self.take_back(block))
    }

    fn take_back(&mut self, block: *mut Iocb) -> Iocb {
        // SAFETY: 1. one of our blocks, which the kernel has not accepted.
        let call = unsafe { block.read() };
        self.release(block.addr() as u64);
        call
    }

    /// Frees the block at this address, whose call has ended.
    #[inline]
    pub fn release(&mut self, address: u64) {
        let offset_bytes = address.wrapping_sub(self.blocks.as_ptr().addr() as u64);
        let index = offset_bytes / size_of::<Iocb>() as u64;
        debug_assert!(index < self.blocks.len() as u64, "a result of an unknown call");
        if let Some(index) = u32::try_from(index).ok().filter(|index| (*index as usize) < self.blocks.len()) {
            self.free.push(index);
        }
    }

    /// Number of free blocks.
    #[inline]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Calls that the kernel has accepted and not completed.
    pub fn in_kernel(&self) -> usize {
        self.blocks.len() - self.free.len() - self.pending().len()
    }

    /// Leaks the blocks.
    pub fn abandon(&mut self) {
        self.pending.clear();
        self.given = 0;
        std::mem::forget(std::mem::take(&mut self.blocks));
    }
}
