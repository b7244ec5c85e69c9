//! The state of one op between `push` and its completion, and the choice of its next call.
//!
//! `op → stage → call: a transfer, fallocate, zeroes that are written out, or a sync`
//!
//! - Zeroing first tries `fallocate` as the op allows it, then a `fallocate` mode that keeps the blocks allocated, and
//!   finally writes zeroes.
//! - A durable write uses a flag of its call. A sync follows where the backend has no such flag, and after a durable
//!   `fallocate`.
//!
//! Makes no system calls and does not depend on the backend. `result.rs` decides what a result means for the op.

use guest_mem::IoVecs;
use libc::{FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE};

use crate::backend::{Buffers, Call, Verb};
use crate::core::bounce::{BUFFER_BYTES, Bounce, BounceId, ZEROES_BYTES};
use crate::core::files::OpenFile;
use crate::core::turn;
use crate::engine::{Durability, FileId, Op, OpKind, Stats, Unmap};

/// `IOV_MAX`: the largest array that the kernel accepts (`UIO_MAXIOV`, linux/uio.h).
const MAX_PIECES: usize = 1024;

const PUNCH_HOLE: i32 = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE;

/// The next call of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Transfer,
    Punch,
    ZeroRange,
    WriteZeroes,
    Sync,
}

/// The kind of op without its range. The core reads an op field by field: copying it whole would stall on the caller's
/// recent stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Read,
    Write(Durability),
    Flush,
    Discard(Durability),
    WriteZeroes(Durability),
}

/// Why the next call cannot be made.
#[derive(Debug)]
pub(crate) enum NoCall {
    /// The op needs a bounce buffer, and none is free.
    NoBounce,
    /// The file behind the guest memory was truncated: the op would write zeroes instead of the guest's data.
    LostMemory,
}

/// An op that the engine owns.
#[derive(Debug)]
pub(crate) struct OpState {
    pub token: u64,
    pub file: FileId,
    pub(super) purpose: Purpose,
    pub buffers: IoVecs,
    pub(super) stage: Stage,
    /// Offset of the first byte that is not yet processed.
    pub(super) offset_bytes: u64,
    pub(super) end_bytes: u64,
    pub stored_bytes: u64,
    pub(super) retries: u16,
    /// The op's bounce buffer, held from the first bounced call until the op ends.
    pub bounce: Option<BounceId>,
    pub cancelled: bool,
    /// A call is queued or in the kernel.
    pub in_kernel: bool,
    /// The next op in the file's wait queue (`turn.rs`).
    pub next_in_line: u32,
    /// Cost of the op's call in its file's window (`window.rs`); 0 if there is no call or no window.
    pub window_cost: u32,
}

impl OpState {
    /// Takes ownership of the op's buffers.
    ///
    /// # Panics
    /// If the buffers are not as long as the range.
    #[inline]
    pub fn new(op: &mut Op) -> Self {
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
            offset_bytes,
            end_bytes,
            stored_bytes: 0,
            retries: 0,
            bounce: None,
            cancelled: false,
            in_kernel: false,
            next_in_line: turn::NONE,
            window_cost: 0,
        }
    }

    /// Whether the op's range is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.stage != Stage::Sync && self.offset_bytes == self.end_bytes
    }

    /// Whether the op's next or current call is a sync, of a flush or at the end of a durable op.
    #[inline]
    pub fn is_at_sync(&self) -> bool {
        self.stage == Stage::Sync
    }

    #[inline]
    pub(super) fn remaining_bytes(&self) -> u64 {
        self.end_bytes - self.offset_bytes
    }

    /// Chooses how to zero a range, given which calls the file has refused. Must run before the cost of the next call
    /// is computed.
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

    /// Returns the next call. May take a bounce buffer, and fills it for a write.
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
            Stage::Punch if file.has_discard && matches!(self.purpose, Purpose::Discard(_)) => {
                self.call(Verb::Discard, 0, self.remaining_bytes(), Buffers::None)
            }
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

    /// Cost of the next call in its file's turn.
    #[inline]
    pub fn cost_bytes(&self, file: &OpenFile) -> u64 {
        turn::cost_bytes(self.call_bytes(file), file.copies_nothing())
    }

    /// Upper bound of the bytes that the next call moves.
    #[inline]
    pub fn call_bytes(&self, file: &OpenFile) -> u64 {
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
        let (verb, flags) = self.transfer_verb(file);
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

    /// Fast path for nearly all ops: a transfer from or to the guest's own buffers. On `None` the caller uses
    /// [`OpState::next_call`].
    #[inline(always)] // so that the call is passed in registers, not through the stack, to the kernel's queue
    pub fn direct_transfer(&self, file: &OpenFile) -> Option<Call> {
        if self.stage != Stage::Transfer || self.wants_bounce(file) {
            return None;
        }
        let (verb, flags) = self.transfer_verb(file);
        if verb == Verb::Write && self.buffers.is_poisoned() {
            return None;
        }
        let (len_bytes, buffers) = direct_buffers(self, file);
        Some(self.call(verb, flags, len_bytes, buffers))
    }

    #[inline]
    fn transfer_verb(&self, file: &OpenFile) -> (Verb, i32) {
        match self.purpose {
            Purpose::Write(Durability::Durable) if file.has_durable_writes => (Verb::Write, libc::RWF_DSYNC),
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

/// The part of `buffers` that fits one call. Limits it to `most_bytes` and cuts only between segments, but always
/// includes the first segment.
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
