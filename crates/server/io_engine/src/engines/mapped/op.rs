//! The state of one op, and the names of inner ops.

use disk_image::volume::Lookup;
use guest_mem::{IoVecs, PieceCursor};

use crate::engine::{Durability, FileId, OpError, OpKind, Unmap};

/// What an op does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Read,
    Write(Durability),
    Flush,
    Discard(Durability),
    WriteZeroes(Unmap, Durability),
}

impl Work {
    pub fn of(kind: &OpKind) -> Self {
        match *kind {
            OpKind::Read { .. } => Self::Read,
            OpKind::Write { durability, .. } => Self::Write(durability),
            OpKind::Flush => Self::Flush,
            OpKind::Discard { durability, .. } => Self::Discard(durability),
            OpKind::WriteZeroes { unmap, durability, .. } => Self::WriteZeroes(unmap, durability),
        }
    }

    /// Whether what the op has changed must be durable when it ends.
    pub fn is_durable(self) -> bool {
        matches!(
            self,
            Self::Write(Durability::Durable)
                | Self::Discard(Durability::Durable)
                | Self::WriteZeroes(_, Durability::Durable)
        )
    }

    pub fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::Write(_))
    }
}

/// An op of a guest, in its slot.
pub(super) struct OpState {
    pub is_running: bool,
    pub work: Work,
    /// The op's group for `Member::end`, on a writable disk.
    pub group: u8,
    /// The caller's name for the op.
    pub token: u64,
    pub file: FileId,
    /// Empty while the inner engine has them (`Token::Whole`).
    pub buffers: IoVecs,
    /// The buffers' first byte for which no piece has begun.
    pub cursor: PieceCursor,
    /// The guest's offset of the op's first byte.
    pub offset_bytes: u64,
    pub len_bytes: u64,
    /// The volume's file, if the inner engine has the whole op.
    pub whole_file: usize,
    /// Bytes for which pieces have begun.
    pub begun_bytes: u64,
    /// How far the lookup of the next piece has come.
    pub lookup: Lookup,
    /// Pieces in flight, and 1 while a table is read.
    pub pending: u16,
    /// Where the first piece failed, counted from the op's start, and why.
    pub failed: Option<(u64, OpError)>,
    pub cancelled: bool,
    /// The op waits in its disk's line.
    pub is_in_line: bool,
    /// The op goes on in the next turn.
    pub is_due: bool,
    /// The op waits for a slice of a table.
    pub is_waiting: bool,
    /// The op waits for the answer with this token.
    pub asked: Option<u64>,
    /// The answer may come when the op has ended. A change that the guest sees must have ended before.
    pub may_leave: bool,
    /// The changes that the op depends on are durable.
    pub is_synced: bool,
    pub sync_failed: bool,
}

impl Default for OpState {
    fn default() -> Self {
        Self {
            is_running: false,
            work: Work::Read,
            group: 0,
            token: 0,
            file: FileId(0),
            buffers: IoVecs::default(),
            cursor: PieceCursor::default(),
            offset_bytes: 0,
            len_bytes: 0,
            whole_file: 0,
            begun_bytes: 0,
            lookup: Lookup::new(0),
            pending: 0,
            failed: None,
            cancelled: false,
            is_in_line: false,
            is_due: false,
            is_waiting: false,
            asked: None,
            may_leave: false,
            is_synced: false,
            sync_failed: false,
        }
    }
}

impl OpState {
    /// The guest's offset of the first byte for which no piece has begun.
    pub fn at(&self) -> u64 {
        self.offset_bytes + self.begun_bytes
    }

    pub fn left_bytes(&self) -> u64 {
        self.len_bytes - self.begun_bytes
    }

    /// Remembers the failure that is closest to the op's start.
    pub fn fail(&mut self, at_bytes: u64, error: OpError) {
        if self.failed.is_none_or(|(before, _)| at_bytes < before) {
            self.failed = Some((at_bytes, error));
        }
    }

    /// Whether no further piece may begin.
    pub fn is_over(&self) -> bool {
        self.cancelled || self.failed.is_some() || self.begun_bytes == self.len_bytes
    }

    /// Counts a piece that has begun.
    pub fn begin_piece(&mut self, len_bytes: u64) {
        self.begun_bytes += len_bytes;
        self.lookup = Lookup::new(self.len_bytes - self.begun_bytes);
    }
}

/// What an inner op is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// A whole op, by its slot.
    Whole(u32),
    /// A part of an op: disk and part.
    Part(u32, u32),
    /// A slice of a table: disk and load.
    Table(u32, u32),
    /// A read into scratch memory: disk and copy.
    Copy(u32, u32),
}

impl Token {
    /// Two bits of kind, 30 bits of disk, 32 bits of index.
    #[inline]
    pub fn encode(self) -> u64 {
        let (kind, disk, index) = match self {
            Self::Whole(slot) => (0, 0, slot),
            Self::Part(disk, index) => (1, disk, index),
            Self::Table(disk, index) => (2, disk, index),
            Self::Copy(disk, index) => (3, disk, index),
        };
        kind << 62 | u64::from(disk) << 32 | u64::from(index)
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // 30 and 32 bits
    pub fn decode(token: u64) -> Self {
        let (disk, index) = ((token >> 32) as u32 & (u32::MAX >> 2), token as u32);
        match token >> 62 {
            0 => Self::Whole(index),
            1 => Self::Part(disk, index),
            2 => Self::Table(disk, index),
            _ => Self::Copy(disk, index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_what_it_was() {
        let tokens = [
            Token::Whole(u32::MAX),
            Token::Part(7, 9),
            Token::Table(0x3fff_ffff, 0),
            Token::Copy(1, u32::MAX),
        ];
        assert_eq!(tokens.map(|token| Token::decode(token.encode())), tokens);
    }

    #[test]
    fn failure_closest_to_the_start_counts() {
        let mut op = OpState::default();
        [500, 100, 300].into_iter().for_each(|at| op.fail(at, OpError::Cancelled));
        assert_eq!(op.failed.map(|(at, _)| at), Some(100));
    }
}
