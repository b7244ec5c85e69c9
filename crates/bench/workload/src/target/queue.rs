//! A queue that one thread uses alone, and the buffers of any thread on a socket.

use std::time::Duration;

use blk_driver::{Buffer, Completion, Durability, Pool, Queue, Request, Work};
use disk_image::SECTOR_BYTES;
use guest_mem::GuestRange;

use super::port::{Ask, Done, Io, Port, PortError};
use crate::measured::QueueCounts;

/// Limit of memory that is allocated from the pool in one piece.
const PIECE_BYTES: u64 = 64 << 20;
/// Completions per poll.
const LOOK: usize = 64;

/// A thread's blocks in the pool.
#[derive(Debug)]
pub(crate) struct Blocks {
    pieces: Vec<Buffer>,
    per_piece: u32,
    block_bytes: u32,
    /// One range per slot, in the form that requests need.
    ranges: Vec<[GuestRange; 1]>,
}

impl Blocks {
    /// Takes `depth` blocks of `block_bytes`.
    pub fn take(pool: &Pool, block_bytes: u32, depth: u32) -> Result<Self, PortError> {
        let per_piece = per_piece(block_bytes).min(depth);
        let piece = |_| pool.take(per_piece * block_bytes);
        let pieces: Result<Vec<_>, _> = (0..depth.div_ceil(per_piece)).map(piece).collect();
        let pieces = pieces.map_err(|error| PortError::because("cannot allocate buffers", &error))?;
        let range = |slot: u32| {
            let piece = pieces.get((slot / per_piece) as usize).map_or(0, |piece| piece.range().addr);
            let addr = piece + u64::from(slot % per_piece) * u64::from(block_bytes);
            [GuestRange { addr, len_bytes: block_bytes }]
        };
        let ranges = (0..depth).map(range).collect();
        Ok(Self { pieces, per_piece, block_bytes, ranges })
    }

    /// The memory that [`Blocks::take`] takes from a pool, including rounding.
    pub fn needed_bytes(block_bytes: u32, depth: u32) -> u64 {
        let per_piece = per_piece(block_bytes).min(depth);
        let piece_bytes = (u64::from(per_piece) * u64::from(block_bytes)).next_multiple_of(4096);
        u64::from(depth.div_ceil(per_piece)) * piece_bytes
    }

    pub fn fill(&self, slot: u32, block: &[u8]) -> Result<(), PortError> {
        let (piece, at) = self.place(slot)?;
        piece.write(at, block);
        Ok(())
    }

    pub fn read(&self, slot: u32, block: &mut [u8]) -> Result<(), PortError> {
        let (piece, at) = self.place(slot)?;
        piece.read(at, block);
        Ok(())
    }

    fn place(&self, slot: u32) -> Result<(&Buffer, u32), PortError> {
        let piece = self.pieces.get((slot / self.per_piece) as usize);
        let piece = piece.ok_or_else(|| PortError(format!("slot {slot} has no buffer")))?;
        Ok((piece, (slot % self.per_piece) * self.block_bytes))
    }

    /// The request in the driver's form.
    pub fn request(&self, io: &Io, token: u64) -> Request<'_> {
        let data = self.ranges.get(io.slot as usize).map_or(&[][..], |range| range);
        let sector = io.offset_bytes / SECTOR_BYTES;
        let work = match io.ask {
            Ask::Read => Work::Read { sector, data },
            Ask::Write => Work::Write { sector, data, durability: Durability::Cached },
            Ask::Flush => Work::Flush,
        };
        Request::new(work, token)
    }
}

fn per_piece(block_bytes: u32) -> u32 {
    u32::try_from(PIECE_BYTES / u64::from(block_bytes.max(1))).unwrap_or(1).max(1)
}

pub(crate) struct QueuePort {
    queue: Queue,
    blocks: Blocks,
    completions: Vec<Completion>,
    pushed: usize,
}

impl QueuePort {
    pub fn new(queue: Queue, blocks: Blocks) -> Self {
        Self { queue, blocks, completions: vec![Completion::default(); LOOK], pushed: 0 }
    }
}

impl Port for QueuePort {
    fn push(&mut self, io: Io) -> Result<(), PortError> {
        let request = self.blocks.request(&io, io.slot.into());
        self.queue.push(&request).map_err(|error| PortError::because("queue", &error))?;
        self.pushed += 1;
        Ok(())
    }

    fn submit(&mut self) -> Result<usize, PortError> {
        self.queue.submit();
        Ok(std::mem::take(&mut self.pushed))
    }

    fn reap(&mut self, done: &mut Vec<Done>, limit: Option<Duration>) -> Result<(), PortError> {
        let taken = match limit {
            None => self.queue.completions(&mut self.completions),
            Some(limit) => self.queue.wait(&mut self.completions, limit),
        };
        let taken = taken.map_err(|error| PortError::because("the back-end", &error))?;
        for completion in self.completions.iter().take(taken) {
            #[allow(clippy::cast_possible_truncation)] // the slot given to `push`
            let slot = completion.token as u32;
            done.push(Done { slot, result: completion.result.map_err(|error| error.to_string()) });
        }
        Ok(())
    }

    fn fill(&mut self, slot: u32, block: &[u8]) -> Result<(), PortError> {
        self.blocks.fill(slot, block)
    }

    fn read(&self, slot: u32, block: &mut [u8]) -> Result<(), PortError> {
        self.blocks.read(slot, block)
    }

    fn counts(&self) -> QueueCounts {
        counts(&self.queue.stats())
    }
}

pub(crate) fn counts(stats: &blk_driver::QueueStats) -> QueueCounts {
    QueueCounts { kicks: stats.kicks, sleeps: stats.sleeps, publications: stats.publications }
}
