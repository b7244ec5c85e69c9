//! One op between `push` and its completion: which call comes next, and what a result means for it.
//!
//! `op → call → result → done | the same again (EINTR, EAGAIN) | the rest (short transfer) | next stage`
//!
//! - A read that meets the end of the file is an error, never zeroes; a write of nothing is one too.
//! - On a file with `O_DIRECT`, progress counts in whole blocks: the rest of a transfer that stopped
//!   inside one is done again from the block's start, because the kernel refuses to start anywhere else.
//! - Zeroes: `fallocate` as the op allows, then a form that keeps the blocks, then written out.
//! - A durable `fallocate` is one that `fdatasync` followed; so is a durable write where the call has no flag.
//!
//! Pure: no system calls, no knowledge of any engine. Not here: queues and retry order (`core.rs`).

use guest_mem::IoVecs;
use libc::{FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE};
use rustix::io::Errno;

use crate::backend::{Buffers, Call};
use crate::core::bounce::{BUFFER_BYTES, Bounce, BounceId, ZEROES_BYTES};
use crate::core::files::OpenFile;
use crate::core::turn;
use crate::core::window;
use crate::engine::{Durability, FileId, Op, OpError, OpKind, Stats, Unmap};
use crate::record::Verb;

/// `IOV_MAX`: the kernel takes no longer array (`UIO_MAXIOV`, linux/uio.h).
const MAX_PIECES: usize = 1024;
/// Consecutive EINTR or EAGAIN before they are believed.
pub(crate) const MAX_RETRIES: u16 = 1000;

const PUNCH_HOLE: i32 = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE;

/// What the next call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Transfer,
    Punch,
    ZeroRange,
    WriteZeroes,
    Sync,
}

/// What is to be done, without the place: an op that is only read field by field is not copied as a whole, which
/// would wait for the stores of whoever wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Read,
    Write(Durability),
    Flush,
    Discard(Durability),
    WriteZeroes(Durability),
}

/// What a result leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Call,
    Done(Result<(), OpError>),
}

/// Why the next call is not made.
#[derive(Debug)]
pub(crate) enum NoCall {
    /// Not before a bounce buffer comes free.
    NoBounce,
    /// The data is gone: what would be written may be zeroes of our own.
    LostMemory,
}

/// An op the engine owns.
#[derive(Debug)]
pub(crate) struct OpState {
    pub token: u64,
    pub file: FileId,
    purpose: Purpose,
    pub buffers: IoVecs,
    stage: Stage,
    /// A durable write carries a flag; where there is none, a sync follows it.
    flags_durability: bool,
    /// First byte not yet done.
    offset_bytes: u64,
    end_bytes: u64,
    pub stored_bytes: u64,
    retries: u16,
    /// Its buffer, from the first bounced call to the end of the op.
    pub bounce: Option<BounceId>,
    pub cancelled: bool,
    /// A call is queued or in the kernel.
    pub in_kernel: bool,
    /// The op behind it in its file's line (`turn.rs`).
    pub next_in_line: u32,
    /// What its call takes of its file's window (`window.rs`); 0 without a call, or without a window.
    pub window_cost: u32,
    /// Place of the call in the recorder's log.
    pub record: usize,
}

impl OpState {
    /// Takes the buffers out of `op`.
    ///
    /// # Panics
    /// If the buffers are not as long as the range: the caller's mistake.
    #[inline]
    pub fn new(op: &mut Op, flags_durability: bool) -> Self {
        let Op { token, file, ref kind, ref mut buffers } = *op;
        let (purpose, stage) = (purpose_of(kind), first_stage(kind));
        let (offset_bytes, end_bytes) =
            kind.range().map_or((0, 0), |range| (range.offset_bytes(), range.end_bytes()));
        let len_bytes = end_bytes - offset_bytes;
        assert!(
            stage != Stage::Transfer || buffers.remaining_bytes() == len_bytes,
            "buffers differ from the range"
        );
        Self {
            token,
            file,
            purpose,
            buffers: std::mem::take(buffers),
            stage,
            flags_durability,
            offset_bytes,
            end_bytes,
            stored_bytes: 0,
            retries: 0,
            bounce: None,
            cancelled: false,
            in_kernel: false,
            next_in_line: turn::NONE,
            window_cost: 0,
            record: 0,
        }
    }

    /// Whether there is nothing to do.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.stage != Stage::Sync && self.offset_bytes == self.end_bytes
    }

    /// Whether its next call, or its last one, is a sync: a flush, or the end of something durable.
    #[inline]
    pub fn is_at_sync(&self) -> bool {
        self.stage == Stage::Sync
    }

    #[inline]
    fn remaining_bytes(&self) -> u64 {
        self.end_bytes - self.offset_bytes
    }

    /// Chooses how to zero a range, by what the file has refused. The cost of the next call counts only after this.
    #[inline]
    pub fn settle_stage(&mut self, file: &OpenFile) {
        if matches!(self.stage, Stage::Punch | Stage::ZeroRange) {
            self.settle_zeroes(file);
        }
    }

    #[cold]
    fn settle_zeroes(&mut self, file: &OpenFile) {
        if self.stage == Stage::Punch && file.cannot_punch && !matches!(self.purpose, Purpose::Discard(_)) {
            self.stage = Stage::ZeroRange;
        }
        if self.stage == Stage::ZeroRange && file.cannot_zero_range {
            self.stage = Stage::WriteZeroes;
        }
    }

    /// The next call. May take a bounce buffer, and fills it for a write.
    #[inline]
    pub fn next_call(
        &mut self,
        file: &OpenFile,
        bounce: &mut Bounce,
        stats: &mut Stats,
    ) -> Result<Call, NoCall> {
        self.settle_stage(file);
        let allocate = |flags| self.call(Verb::Allocate, flags, self.remaining_bytes(), Buffers::None);
        Ok(match self.stage {
            Stage::Transfer => return self.next_transfer(file, bounce, stats),
            Stage::Punch => allocate(PUNCH_HOLE),
            Stage::ZeroRange => allocate(ZERO_RANGE),
            Stage::WriteZeroes => {
                #[allow(clippy::cast_possible_truncation)] // at most ZEROES_BYTES
                let len_bytes = self.call_bytes(file) as u32;
                let buffers = Buffers::One { base: bounce.zeroes(), len_bytes };
                self.call(Verb::Write, 0, len_bytes.into(), buffers)
            }
            Stage::Sync => {
                Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None }
            }
        })
    }

    /// What its next call takes of its file's turn.
    #[inline]
    pub fn cost_bytes(&self, file: &OpenFile) -> u64 {
        turn::cost_bytes(self.call_bytes(file), file.wants_alignment())
    }

    /// What its next call takes of its file's window.
    #[inline]
    pub fn window_cost(&self, file: &OpenFile) -> u32 {
        window::cost_bytes(self.call_bytes(file))
    }

    /// What its next call moves at most.
    #[inline]
    fn call_bytes(&self, file: &OpenFile) -> u64 {
        let most_bytes = match self.stage {
            Stage::Transfer => file.most_bytes,
            Stage::WriteZeroes => file.most_bytes.min(ZEROES_BYTES as u64),
            Stage::Punch | Stage::ZeroRange | Stage::Sync => 0,
        };
        self.remaining_bytes().min(most_bytes)
    }

    #[inline]
    fn call(&self, verb: Verb, flags: i32, len_bytes: u64, buffers: Buffers) -> Call {
        Call { verb, flags, offset_bytes: self.offset_bytes, len_bytes, buffers }
    }

    #[inline]
    fn next_transfer(
        &mut self,
        file: &OpenFile,
        bounce: &mut Bounce,
        stats: &mut Stats,
    ) -> Result<Call, NoCall> {
        if let Some(call) = self.direct_transfer(file) {
            return Ok(call);
        }
        let (verb, flags) = self.transfer_verb();
        let (len_bytes, buffers) = if self.wants_bounce(file) {
            self.bounced_buffers(verb, file.most_bytes, bounce, stats)?
        } else {
            direct_buffers(self, file)
        };
        if verb == Verb::Write && self.buffers.is_poisoned() {
            return Err(NoCall::LostMemory);
        }
        Ok(self.call(verb, flags, len_bytes, buffers))
    }

    /// The next call of nearly all ops: a transfer from or to the guest's own buffers. `None`: what is next is
    /// found out by [`OpState::next_call`].
    #[inline(always)] // the call then goes from registers into the kernel's queue, and not by way of the stack
    pub fn direct_transfer(&self, file: &OpenFile) -> Option<Call> {
        if self.stage != Stage::Transfer || self.wants_bounce(file) {
            return None;
        }
        let (verb, flags) = self.transfer_verb();
        if verb == Verb::Write && self.buffers.is_poisoned() {
            return None;
        }
        let (len_bytes, buffers) = direct_buffers(self, file);
        Some(self.call(verb, flags, len_bytes, buffers))
    }

    #[inline]
    fn transfer_verb(&self) -> (Verb, i32) {
        match self.purpose {
            Purpose::Write(Durability::Durable) if self.flags_durability => (Verb::Write, libc::RWF_DSYNC),
            Purpose::Write(_) => (Verb::Write, 0),
            _ => (Verb::Read, 0),
        }
    }

    #[inline]
    fn wants_bounce(&self, file: &OpenFile) -> bool {
        let alignment = file.alignment();
        self.bounce.is_some()
            || file.wants_alignment()
                && !self.buffers.is_aligned(alignment.memory_bytes, alignment.offset_bytes)
    }

    #[cold]
    fn bounced_buffers(
        &mut self,
        verb: Verb,
        most_bytes: u64,
        bounce: &mut Bounce,
        stats: &mut Stats,
    ) -> Result<(u64, Buffers), NoCall> {
        let id = match self.bounce {
            Some(id) => id,
            None => {
                let id = bounce.take(self.file).ok_or(NoCall::NoBounce)?;
                stats.bounced_ops += 1;
                *self.bounce.insert(id)
            }
        };
        #[allow(clippy::cast_possible_truncation)] // at most BUFFER_BYTES
        let len_bytes = self.remaining_bytes().min(most_bytes).min(BUFFER_BYTES as u64) as u32;
        if verb == Verb::Write {
            self.buffers.copy_out(&mut bounce.bytes_mut(id)[..len_bytes as usize]);
        }
        Ok((len_bytes.into(), Buffers::One { base: bounce.base(id), len_bytes }))
    }

    /// Takes the result of the last call.
    #[inline]
    pub fn on_result(
        &mut self,
        result: i32,
        file: &mut OpenFile,
        bounce: &Bounce,
        stats: &mut Stats,
    ) -> Next {
        let next = match u64::try_from(result) {
            Ok(done) => self.on_success(done, file, bounce, stats),
            Err(_) => self.on_errno(Errno::from_raw_os_error(-result), file, stats),
        };
        match next {
            Next::Call if self.cancelled => Next::Done(Err(OpError::Cancelled)),
            next => next,
        }
    }

    #[inline]
    fn on_success(&mut self, done: u64, file: &OpenFile, bounce: &Bounce, stats: &mut Stats) -> Next {
        self.retries = 0;
        match self.stage {
            Stage::Transfer => self.on_transferred(done, file, bounce, stats),
            Stage::WriteZeroes => self.on_zeroes_written(done, file),
            Stage::Punch | Stage::ZeroRange => self.after_data(),
            Stage::Sync => Next::Done(Ok(())),
        }
    }

    #[inline]
    fn on_transferred(&mut self, done: u64, file: &OpenFile, bounce: &Bounce, stats: &mut Stats) -> Next {
        let is_read = self.purpose == Purpose::Read;
        let whole = self.whole_blocks(done, file);
        if whole == 0 {
            return Next::Done(Err(self.stopped(is_read, done, bounce)));
        }
        if is_read {
            self.store(whole, bounce);
        } else if self.buffers.is_poisoned() {
            // The data went while a copy of ours took it, and zeroes may be what was written.
            return Next::Done(Err(OpError::Errno(Errno::FAULT)));
        }
        self.buffers.advance(whole);
        self.offset_bytes += whole;
        if self.offset_bytes == self.end_bytes {
            return if self.flags_durability { Next::Done(Ok(())) } else { self.after_data() };
        }
        stats.resumed_calls += 1;
        Next::Call
    }

    /// Counts what a read put into guest memory. The dirty log learns of it from whoever gets the buffers back.
    #[inline]
    fn store(&mut self, bytes: u64, bounce: &Bounce) {
        if let Some(id) = self.bounce {
            #[allow(clippy::cast_possible_truncation)] // the call was no longer than the buffer
            self.buffers.copy_in(&bounce.bytes(id)[..bytes as usize]);
        }
        self.stored_bytes += bytes;
    }

    /// Progress that the next call can start after.
    #[inline]
    fn whole_blocks(&self, done: u64, file: &OpenFile) -> u64 {
        let block_mask = u64::from(file.alignment().offset_bytes) - 1;
        if done == self.remaining_bytes() { done } else { done & !block_mask }
    }

    #[cold]
    fn stopped(&mut self, is_read: bool, done: u64, bounce: &Bounce) -> OpError {
        if !is_read {
            return OpError::WriteStalled { offset_bytes: self.offset_bytes };
        }
        self.store(done, bounce);
        OpError::EndOfImage { offset_bytes: self.offset_bytes + done, end_bytes: self.end_bytes }
    }

    fn on_zeroes_written(&mut self, done: u64, file: &OpenFile) -> Next {
        let whole = self.whole_blocks(done, file);
        if whole == 0 {
            return Next::Done(Err(OpError::WriteStalled { offset_bytes: self.offset_bytes }));
        }
        self.offset_bytes += whole;
        if self.offset_bytes == self.end_bytes { self.after_data() } else { Next::Call }
    }

    /// Everything was moved or zeroed; what is to be durable and is not yet, is synced.
    fn after_data(&mut self) -> Next {
        match self.purpose {
            Purpose::Write(Durability::Durable)
            | Purpose::Discard(Durability::Durable)
            | Purpose::WriteZeroes(Durability::Durable) => {
                self.stage = Stage::Sync;
                Next::Call
            }
            _ => Next::Done(Ok(())),
        }
    }

    #[cold]
    fn on_errno(&mut self, errno: Errno, file: &mut OpenFile, stats: &mut Stats) -> Next {
        let unsupported = errno == Errno::OPNOTSUPP || errno == Errno::NOSYS;
        let may_write_zeroes = matches!(self.purpose, Purpose::WriteZeroes(_));
        match self.stage {
            _ if errno == Errno::INTR || errno == Errno::AGAIN => self.retry(errno, stats),
            // The host may say the same for reasons of its own.
            _ if errno == Errno::CANCELED && self.cancelled => Next::Done(Err(OpError::Cancelled)),
            Stage::Punch if unsupported && may_write_zeroes => {
                file.cannot_punch = true;
                Next::Call
            }
            Stage::ZeroRange if unsupported && may_write_zeroes => {
                file.cannot_zero_range = true;
                Next::Call
            }
            // The range is not in whole sectors of the device; another range may be.
            Stage::Punch | Stage::ZeroRange if errno == Errno::INVAL && may_write_zeroes => {
                self.stage = Stage::WriteZeroes;
                Next::Call
            }
            _ => Next::Done(Err(OpError::Errno(errno))),
        }
    }

    fn retry(&mut self, errno: Errno, stats: &mut Stats) -> Next {
        if self.retries == MAX_RETRIES {
            return Next::Done(Err(OpError::Errno(errno)));
        }
        self.retries += 1;
        stats.retried_calls += 1;
        Next::Call
    }
}

#[inline]
fn purpose_of(kind: &OpKind) -> Purpose {
    match *kind {
        OpKind::Read { .. } => Purpose::Read,
        OpKind::Write { durability, .. } => Purpose::Write(durability),
        OpKind::Flush => Purpose::Flush,
        OpKind::Discard { durability, .. } => Purpose::Discard(durability),
        OpKind::WriteZeroes { durability, .. } => Purpose::WriteZeroes(durability),
    }
}

#[inline]
fn first_stage(kind: &OpKind) -> Stage {
    match kind {
        OpKind::Read { .. } | OpKind::Write { .. } => Stage::Transfer,
        OpKind::Flush => Stage::Sync,
        OpKind::Discard { .. } | OpKind::WriteZeroes { unmap: Unmap::Allowed, .. } => Stage::Punch,
        OpKind::WriteZeroes { unmap: Unmap::Forbidden, .. } => Stage::ZeroRange,
    }
}

/// Length and buffers of one call on the guest's own memory.
#[inline(always)] // as `direct_transfer`
fn direct_buffers(op: &OpState, file: &OpenFile) -> (u64, Buffers) {
    let most_bytes = file.most_bytes;
    (op.remaining_bytes().min(most_bytes), first_pieces(&op.buffers, most_bytes))
}

/// As much of `buffers` as one call takes: at most `most_bytes`, except that a single piece is never left out
/// and an array is cut between pieces.
#[inline(always)] // as `direct_transfer`
fn first_pieces(buffers: &IoVecs, most_bytes: u64) -> Buffers {
    let pieces = buffers.as_raw();
    match pieces {
        [] => Buffers::None,
        [one, rest @ ..] if rest.is_empty() || one.iov_len as u64 >= most_bytes => {
            #[allow(clippy::cast_possible_truncation)] // below 2^31
            let len_bytes = (one.iov_len as u64).min(most_bytes) as u32;
            Buffers::One { base: one.iov_base.cast(), len_bytes }
        }
        many => Buffers::Many { first: many.as_ptr(), count: whole_pieces(many, most_bytes) },
    }
}

fn whole_pieces(pieces: &[libc::iovec], most_bytes: u64) -> u32 {
    let mut total_bytes = 0;
    let fits = |piece: &&libc::iovec| {
        total_bytes += piece.iov_len as u64;
        total_bytes <= most_bytes
    };
    #[allow(clippy::cast_possible_truncation)] // at most 1024
    let count = pieces.iter().take(MAX_PIECES).take_while(fits).count() as u32;
    count
}

#[cfg(test)]
#[path = "op_tests.rs"]
mod tests;
