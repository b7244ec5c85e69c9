//! Control blocks, the calls that they belong to, and the sum of a call's results.
//!
//! `take (a call) → one control block per piece → start → finish (each piece) → the call's result`
//!
//! - The blocks never move, and the waiters share them. The C library writes to a block for as
//!   long as its request is in flight.
//! - A block becomes free when its request has ended *and* no waiter uses the block.
//! - A call uses as many blocks as its file's share allows (`shares.rs`), from one to [`MAX_PIECES`]. The core resumes
//!   the rest of the call. All blocks are allocated at the start. They suffice for half as many files as one file alone
//!   may use blocks; with more files, a call may have to wait for a block.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::backend::{Buffers, Call, RawResult, Verb};
use crate::core::shares::Shares;
use crate::engine::FileId;

/// Maximum number of requests per call, all in flight together. More are not faster.
const MAX_PIECES: usize = 16;
/// Number of blocks beyond one per call.
const SPARE_BLOCKS: u32 = 128;
/// The reserve of each file.
const LEAST_BLOCKS: u32 = 1;
/// Marks the last piece.
const LAST: u32 = u32::MAX;
const NO_CALL: CallState = CallState { user_data: 0, file: FileId(0), first: LAST, left: 0 };

/// All blocks. See the module documentation.
#[derive(Debug)]
pub(super) struct ControlBlocks {
    blocks: Box<[UnsafeCell<libc::aiocb>]>,
    /// For each block: the ticket of the waiter that uses the block, or 0.
    tickets: Box<[AtomicU64]>,
}

// SAFETY: 1. the worker writes a block while neither the C library nor a waiter uses it; otherwise only functions of
// the C library access it, under their own lock; 2. the pointers in it belong to an op that the engine keeps until the
// request has ended.
unsafe impl Send for ControlBlocks {}
// SAFETY: as above.
unsafe impl Sync for ControlBlocks {}

impl ControlBlocks {
    fn new(count: u32) -> Self {
        // SAFETY: 1. a C structure of numbers and pointers, for which all zeroes are a valid value.
        let zeroed = || UnsafeCell::new(unsafe { std::mem::zeroed::<libc::aiocb>() });
        Self {
            blocks: (0..count).map(|_| zeroed()).collect(),
            tickets: (0..count).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub fn at(&self, slot: u32) -> *mut libc::aiocb {
        self.blocks[slot as usize].get()
    }

    pub fn is_pending(&self, slot: u32) -> bool {
        self.error(slot) == libc::EINPROGRESS
    }

    fn error(&self, slot: u32) -> i32 {
        // SAFETY: 1. the block lives as long as `self`, and was initialised by `new`.
        unsafe { libc::aio_error(self.at(slot)) }
    }

    /// A byte count, 0, or a negated errno, once the request has ended.
    pub fn result(&self, slot: u32) -> Option<i32> {
        match self.error(slot) {
            libc::EINPROGRESS => None,
            0 => {
                // SAFETY: 1. as in `error`; 2. the request has ended, and its result is read once.
                let bytes = unsafe { libc::aio_return(self.at(slot)) };
                Some(i32::try_from(bytes).unwrap_or(i32::MAX))
            }
            errno => Some(-errno),
        }
    }

    /// Records that a waiter uses the block, which stays reserved until [`ControlBlocks::release`].
    pub fn hold(&self, slot: u32, ticket: u64) {
        self.tickets[slot as usize].store(ticket, Ordering::SeqCst);
    }

    pub fn release(&self, slot: u32) {
        self.tickets[slot as usize].store(0, Ordering::SeqCst);
    }

    pub fn has_waiter(&self, slot: u32, ticket: u64) -> bool {
        self.tickets[slot as usize].load(Ordering::SeqCst) == ticket
    }

    fn is_held(&self, slot: u32) -> bool {
        !self.has_waiter(slot, 0)
    }
}

/// One request: a piece of a call.
#[derive(Clone, Copy, Debug)]
struct Piece {
    verb: Verb,
    call: u32,
    next: u32,
    len_bytes: u32,
    result: i32,
}

#[derive(Clone, Copy, Debug)]
struct CallState {
    user_data: u64,
    file: FileId,
    first: u32,
    /// Number of pieces that have not ended.
    left: u32,
}

/// The file range and buffer of a piece.
#[derive(Clone, Copy, Debug)]
struct Extent {
    base: *mut u8,
    len_bytes: u32,
    offset_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Requests {
    blocks: Arc<ControlBlocks>,
    /// Indexed by block.
    pieces: Vec<Piece>,
    free: Vec<u32>,
    /// Blocks of requests that have ended while a waiter still uses them.
    lingering: Vec<u32>,
    calls: Vec<CallState>,
    free_calls: Vec<u32>,
    /// Each file's share of the blocks.
    pub shares: Shares,
    pub results: VecDeque<RawResult>,
}

impl Requests {
    pub fn new(depth: u32) -> Self {
        let shared = depth.saturating_add(SPARE_BLOCKS);
        let count = shared.saturating_add(shared / 2);
        let piece = Piece { verb: Verb::Read, call: 0, next: LAST, len_bytes: 0, result: 0 };
        Self {
            blocks: Arc::new(ControlBlocks::new(count)),
            pieces: vec![piece; count as usize],
            free: (0..count).collect(),
            lingering: Vec::with_capacity(count as usize),
            calls: vec![NO_CALL; depth as usize],
            free_calls: (0..depth).collect(),
            shares: Shares::new(shared, LEAST_BLOCKS),
            results: VecDeque::with_capacity(depth as usize),
        }
    }

    /// Allocates space for this many calls.
    pub fn expect(&mut self, calls: u32) {
        #[allow(clippy::cast_possible_truncation)] // never more than were requested
        let before = self.calls.len() as u32;
        self.calls.resize(calls.max(before) as usize, NO_CALL);
        self.free_calls.extend(before..calls.max(before));
    }

    /// Whether all blocks are in use, not only those of one file's share.
    pub fn has_run_out(&self) -> bool {
        self.free.is_empty()
    }

    pub fn capacity(&self) -> usize {
        self.pieces.len()
    }

    pub fn blocks(&self) -> &Arc<ControlBlocks> {
        &self.blocks
    }

    /// The `user_data` of a request's call.
    pub fn user_data(&self, slot: u32) -> u64 {
        self.calls[self.pieces[slot as usize].call as usize].user_data
    }

    /// Takes blocks for `call` on `file`, or for its leading pieces. `place` gets each block in order, and returns the
    /// descriptor of its request. Returns false if no block is free.
    ///
    /// # Safety
    /// The memory that `call.buffers` points to must stay allocated, and no other code may rely on its contents, until
    /// the call's result is available.
    pub unsafe fn take(
        &mut self,
        user_data: u64,
        file: FileId,
        call: &Call,
        mut place: impl FnMut(u32) -> RawFd,
    ) -> bool {
        let has_block = self.shares.room(file) > 0 && (!self.free.is_empty() || self.reclaim());
        let has_room = !self.free_calls.is_empty() && has_block;
        let Some(index) = has_room.then(|| self.free_calls.pop()).flatten() else { return false };
        let mut state = CallState { user_data, file, first: LAST, left: 0 };
        let mut last = LAST;
        let most = self.free.len().min(MAX_PIECES);
        // SAFETY: 1. the caller guarantees that the array is valid.
        for extent in unsafe { extents(call) }.take(most) {
            if !self.shares.take(file) {
                break;
            }
            let Some(slot) = self.free.pop() else { unreachable!("no more than are free") };
            self.fill(slot, call.verb, &extent, place(slot));
            self.pieces[slot as usize] =
                Piece { verb: call.verb, call: index, next: LAST, len_bytes: extent.len_bytes, result: 0 };
            match self.pieces.get_mut(last as usize) {
                Some(last) => last.next = slot,
                None => state.first = slot,
            }
            (last, state.left) = (slot, state.left + 1);
        }
        self.calls[index as usize] = state;
        true
    }

    fn fill(&mut self, slot: u32, verb: Verb, extent: &Extent, fd: RawFd) {
        // SAFETY: 1. a free block: neither the C library nor a waiter uses it, and only the worker, here, takes free
        // blocks.
        let block = unsafe { &mut *self.blocks.at(slot) };
        block.aio_fildes = fd;
        block.aio_reqprio = 0;
        block.aio_sigevent.sigev_notify = libc::SIGEV_NONE;
        if verb != Verb::Sync {
            block.aio_buf = extent.base.cast();
            block.aio_nbytes = extent.len_bytes as usize;
            #[allow(clippy::cast_possible_wrap)] // file offsets are below 2^63
            let offset_bytes = extent.offset_bytes as i64;
            block.aio_offset = offset_bytes;
        }
    }

    /// Passes the request to the C library.
    ///
    /// # Errors
    /// The C library's errno; after `EAGAIN`, try again later.
    pub fn start(&mut self, slot: u32) -> Result<(), i32> {
        let block = self.blocks.at(slot);
        let started = match self.pieces[slot as usize].verb {
            // SAFETY: 1. block: filled by `take`, and neither freed nor accessed before the request has ended; 2.
            // buffer: the caller of `take` keeps it as long.
            Verb::Read => unsafe { libc::aio_read(block) },
            // SAFETY: as above.
            Verb::Write => unsafe { libc::aio_write(block) },
            // SAFETY: as above; no buffer.
            Verb::Sync | Verb::Allocate | Verb::Discard => unsafe { libc::aio_fsync(libc::O_DSYNC, block) },
        };
        if started == 0 { Ok(()) } else { Err(last_errno()) }
    }

    /// Requests cancellation. The C library cancels the request unless a thread has started it.
    pub fn cancel(&self, slot: u32) {
        let block = self.blocks.at(slot);
        // SAFETY: 1. the request was started, and `fill`, the only writer of this field, is not called before the
        // request has ended.
        let fd = unsafe { (*block).aio_fildes };
        // SAFETY: 1. the block lives as long as `self`.
        unsafe { libc::aio_cancel(fd, block) };
    }

    /// Records that the request has ended, or will never start.
    pub fn finish(&mut self, slot: u32, result: i32) {
        let piece = &mut self.pieces[slot as usize];
        piece.result = result;
        let index = piece.call;
        let call = &mut self.calls[index as usize];
        call.left -= 1;
        if call.left == 0 {
            self.finish_call(index);
        }
    }

    fn finish_call(&mut self, index: u32) {
        let CallState { user_data, file, first, .. } = self.calls[index as usize];
        let mut outcome = Outcome::default();
        let mut slot = first;
        while slot != LAST {
            let piece = self.pieces[slot as usize];
            outcome.add(piece.len_bytes, piece.result);
            let home = if self.blocks.is_held(slot) { &mut self.lingering } else { &mut self.free };
            home.push(slot);
            self.shares.give_back(file);
            slot = piece.next;
        }
        self.free_calls.push(index);
        self.results.push_back(RawResult { user_data, result: outcome.result() });
    }

    /// Frees blocks that waiters have released. Returns whether a block is free.
    pub fn reclaim(&mut self) -> bool {
        let (blocks, free) = (&self.blocks, &mut self.free);
        self.lingering.retain(|&slot| {
            let held = blocks.is_held(slot);
            if !held {
                free.push(slot);
            }
            held
        });
        !free.is_empty()
    }
}

/// The pieces of a call in order. A call without data has one empty piece.
///
/// # Safety
/// `call.buffers` must stay valid while the iterator exists.
unsafe fn extents(call: &Call) -> impl Iterator<Item = Extent> {
    let (one, many): (_, &[libc::iovec]) = match call.buffers {
        Buffers::None => (Some((std::ptr::null_mut(), 0)), &[]),
        Buffers::One { base, len_bytes } => (Some((base, len_bytes)), &[]),
        Buffers::Many { first, count } => {
            // SAFETY: 1. the caller guarantees that the array is valid.
            let array = unsafe { std::slice::from_raw_parts(first, count as usize) };
            (None, array)
        }
    };
    #[allow(clippy::cast_possible_truncation)] // a call moves less than 2^31 bytes
    let many = many.iter().map(|piece| (piece.iov_base.cast(), piece.iov_len as u32));
    let mut offset_bytes = call.offset_bytes;
    one.into_iter().chain(many).map(move |(base, len_bytes)| {
        let extent = Extent { base, len_bytes, offset_bytes };
        offset_bytes += u64::from(len_bytes);
        extent
    })
}

/// Adds up the results of a call's pieces in order: the bytes of the leading complete pieces and of the first short
/// one. An error counts only if no earlier piece moved data. Otherwise the call is short, and the core runs into the
/// error again when it resumes the call.
#[derive(Debug, Default)]
struct Outcome {
    bytes: i32,
    error: i32,
    ended: bool,
}

impl Outcome {
    fn add(&mut self, len_bytes: u32, result: i32) {
        if self.ended {
            return;
        }
        match u32::try_from(result) {
            Ok(moved_bytes) => {
                self.bytes = self.bytes.saturating_add(result);
                self.ended = moved_bytes < len_bytes;
            }
            Err(_) => {
                self.error = result;
                self.ended = true;
            }
        }
    }

    fn result(&self) -> i32 {
        if self.bytes == 0 { self.error } else { self.bytes }
    }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result_of(pieces: &[(u32, i32)]) -> i32 {
        let mut outcome = Outcome::default();
        pieces.iter().for_each(|&(len_bytes, result)| outcome.add(len_bytes, result));
        outcome.result()
    }

    #[test]
    fn complete_pieces_add_up() {
        assert_eq!(result_of(&[(512, 512), (4096, 4096), (512, 512)]), 5120);
    }

    #[test]
    fn what_follows_a_short_piece_does_not_count() {
        assert_eq!(result_of(&[(512, 512), (4096, 1000), (512, 512)]), 1512);
    }

    #[test]
    fn error_of_the_first_piece_is_the_calls_although_others_were_moved() {
        assert_eq!(result_of(&[(512, -libc::EIO), (512, 512)]), -libc::EIO);
    }

    #[test]
    fn error_of_a_later_piece_makes_the_call_short() {
        assert_eq!(result_of(&[(512, 512), (512, -libc::EIO), (512, 512)]), 512);
    }

    #[test]
    fn piece_that_moved_nothing_ends_the_call_without_an_error() {
        assert_eq!(result_of(&[(512, 0), (512, -libc::EIO)]), 0);
    }

    #[test]
    fn sync_has_no_bytes() {
        assert_eq!((result_of(&[(0, 0)]), result_of(&[(0, -libc::EIO)])), (0, -libc::EIO));
    }

    #[test]
    fn call_takes_as_many_blocks_as_are_free_and_at_least_one() {
        let mut requests = Requests::new(2);
        requests.shares.attach(FileId(0));
        requests.free.truncate(3);
        let piece = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 512 };
        let pieces = [piece; 2];
        let buffers = Buffers::Many { first: pieces.as_ptr(), count: 2 };
        let call = Call { verb: Verb::Read, flags: 0, offset_bytes: 0, len_bytes: 1024, buffers };
        let mut slots = Vec::new();
        for user_data in 0..3 {
            // SAFETY: 1. the array lives longer than the calls, which are never started.
            let taken = unsafe {
                requests.take(user_data, FileId(0), &call, |slot| {
                    slots.push(slot);
                    0
                })
            };
            slots.push(if taken { 100 } else { 200 });
        }
        let counts: Vec<usize> = slots.split(|&slot| slot >= 100).map(<[u32]>::len).collect();
        assert_eq!((counts, slots.last()), (vec![2, 1, 0, 0], Some(&200)));
    }

    #[test]
    fn block_is_not_used_again_while_a_waiter_looks_at_it() {
        let mut requests = Requests::new(1);
        requests.shares.attach(FileId(0));
        requests.free.truncate(1);
        let call = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None };
        // SAFETY: 1. no buffers.
        let take = |requests: &mut Requests| unsafe { requests.take(7, FileId(0), &call, |_| 0) };
        assert!(take(&mut requests));
        requests.blocks.hold(0, 5);
        requests.finish(0, 0);
        assert!(!take(&mut requests));
        requests.blocks.release(0);
        assert!(take(&mut requests));
    }
}
