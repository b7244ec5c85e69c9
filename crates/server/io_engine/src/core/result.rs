//! Decides what the result of a call means for its op.
//!
//! `result → done | the same call again (EINTR, EAGAIN) | the rest (short transfer) | the next stage`
//!
//! - A read that reaches the end of the file fails; it never returns zeroes. A write that moves nothing fails too.
//! - With `O_DIRECT`, only whole blocks count as progress, because the kernel starts only at block boundaries. A
//!   transfer that stopped inside a block repeats that block.

use rustix::io::Errno;

use super::bounce::Bounce;
use super::files::OpenFile;
use super::op::{OpState, Purpose, Stage};
use crate::engine::{Durability, OpError, Stats};

/// Number of consecutive EINTR or EAGAIN results before the op fails with that errno.
pub(crate) const MAX_RETRIES: u16 = 1000;

/// What to do after a result.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Call,
    Done(Result<(), OpError>),
}

impl OpState {
    /// Handles the result of the last call.
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
            // The guest memory's file was truncated while the engine copied from it, so the write may have stored
            // zeroes.
            return Next::Done(Err(OpError::Errno(Errno::FAULT)));
        }
        self.buffers.advance(whole);
        self.offset_bytes += whole;
        if self.offset_bytes == self.end_bytes {
            return if file.has_durable_writes { Next::Done(Ok(())) } else { self.after_data() };
        }
        stats.resumed_calls += 1;
        Next::Call
    }

    /// Counts the bytes that a read stored in guest memory. The queue marks them in the dirty log on completion.
    #[inline]
    fn store(&mut self, bytes: u64, bounce: &Bounce) {
        if let Some(id) = self.bounce {
            #[allow(clippy::cast_possible_truncation)] // the call was no longer than the buffer
            self.buffers.copy_in(&bounce.bytes(id)[..bytes as usize]);
        }
        self.stored_bytes += bytes;
    }

    /// Number of completed bytes after which the next call can start.
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

    /// All data was moved or zeroed. Starts a sync if the op is durable and its call was not.
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
            // If the op was not cancelled, the host returned ECANCELED for its own reasons.
            _ if errno == Errno::CANCELED && self.cancelled => Next::Done(Err(OpError::Cancelled)),
            Stage::Punch if unsupported && may_write_zeroes => {
                file.cannot_punch = true;
                Next::Call
            }
            Stage::ZeroRange if unsupported && may_write_zeroes => {
                file.cannot_zero_range = true;
                Next::Call
            }
            // The range does not cover whole device sectors. `fallocate` may accept another range.
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
