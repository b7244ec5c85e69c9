//! Requests in flight on one connection: their handles, and their bytes. No I/O.
//!
//! `insert → header (to send) → the replies name the handle → remove`
//!
//! - A handle is the request's slot and a generation, so a reply to a request that has ended is noticed.
//! - All slots are allocated at the start.

pub(crate) mod coverage;

use self::coverage::Coverage;
use crate::protocol::{
    CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, REQUEST_MAGIC,
};

/// Length of a request without its payload.
pub const HEADER_BYTES: usize = 28;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Data of the range.
    Read,
    /// Stores the payload.
    Write {
        /** Durable when the reply arrives. */
        fua: bool,
    },
    /// Makes all writes durable whose replies have arrived.
    Flush,
    /// The range's contents are no longer needed.
    Trim,
    /// The range reads as zeroes from now on.
    WriteZeroes {
        /** The range stays allocated. */
        no_hole: bool,
    },
}

impl Command {
    fn code_and_flags(self) -> (u16, u16) {
        let flag = |on: bool, flag| if on { flag } else { 0 };
        match self {
            Self::Read => (CMD_READ, 0),
            Self::Write { fua } => (CMD_WRITE, flag(fua, CMD_FLAG_FUA)),
            Self::Flush => (CMD_FLUSH, 0),
            Self::Trim => (CMD_TRIM, 0),
            Self::WriteZeroes { no_hole } => (CMD_WRITE_ZEROES, flag(no_hole, CMD_FLAG_NO_HOLE)),
        }
    }
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// What it asks for.
    pub command: Command,
    /// Offset in the export.
    pub offset_bytes: u64,
    /// Length of the range: of the data, for reads and writes.
    pub len_bytes: u32,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    request: Request,
    generation: u32,
    in_use: bool,
    /// All its bytes were sent, so that the server may reply.
    sent: bool,
    progress: Progress,
}

/// What the replies to one request have said so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// Bytes of a read that have arrived or were said to be zeroes.
    pub covered: Coverage,
    /// The first error.
    pub error: u32,
    pub error_chunks: u8,
}

impl Progress {
    #[inline]
    fn clear(&mut self) {
        self.covered.clear();
        (self.error, self.error_chunks) = (0, 0);
    }
}

/// The requests in flight.
#[derive(Debug)]
pub struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Requests {
    /// Room for this many requests.
    #[must_use]
    pub fn new(most: u32) -> Self {
        let request = Request { command: Command::Flush, offset_bytes: 0, len_bytes: 0 };
        let slot = Slot { request, generation: 0, in_use: false, sent: false, progress: Progress::default() };
        Self { slots: vec![slot; most as usize], free: (0..most).rev().collect() }
    }

    /// Number of slots.
    #[must_use]
    pub fn places(&self) -> usize {
        self.slots.len()
    }

    /// Makes room for this many requests. Existing slots keep their numbers.
    pub fn grow(&mut self, most: u32) {
        let (known, most) = (u32::try_from(self.slots.len()).unwrap_or(u32::MAX), most);
        if most > known {
            let more = Self::new(most - known);
            self.slots.extend(more.slots);
            self.free.extend((known..most).rev());
        }
    }

    /// Adds a request and returns its slot; `None` if there is no room.
    pub fn insert(&mut self, request: Request) -> Option<u32> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(index as usize)?;
        slot.request = request;
        (slot.in_use, slot.sent) = (true, false);
        slot.progress.clear();
        Some(index)
    }

    /// Ends a request. Later replies to it are errors of the server.
    pub fn remove(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize).filter(|slot| slot.in_use) {
            slot.in_use = false;
            slot.generation = slot.generation.wrapping_add(1);
            self.free.push(index);
        }
    }

    /// Forgets what an earlier connection has replied, before the request is sent again. The request gets a new handle.
    pub fn restart(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.generation = slot.generation.wrapping_add(1);
            slot.sent = false;
            slot.progress.clear();
        }
    }

    /// Records that the whole request was sent. Replies to it are errors of the server before that.
    pub fn mark_sent(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.sent = true;
        }
    }

    /// Whether the whole request was sent.
    #[must_use]
    pub fn is_sent(&self, index: u32) -> bool {
        self.slots.get(index as usize).is_some_and(|slot| slot.sent)
    }

    /// The request in this slot.
    #[must_use]
    pub fn get(&self, index: u32) -> Option<&Request> {
        self.slots.get(index as usize).filter(|slot| slot.in_use).map(|slot| &slot.request)
    }

    /// The bytes to send before the payload of a write.
    #[must_use]
    pub fn header(&self, index: u32) -> [u8; HEADER_BYTES] {
        let Some(Slot { request, generation, .. }) = self.slots.get(index as usize) else {
            return [0; HEADER_BYTES];
        };
        let (code, flags) = request.command.code_and_flags();
        let handle = u64::from(*generation) << 32 | u64::from(index);
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header[4..6].copy_from_slice(&flags.to_be_bytes());
        header[6..8].copy_from_slice(&code.to_be_bytes());
        header[8..16].copy_from_slice(&handle.to_be_bytes());
        header[16..24].copy_from_slice(&request.offset_bytes.to_be_bytes());
        header[24..].copy_from_slice(&request.len_bytes.to_be_bytes());
        header
    }

    /// The slot that a reply means, if its request was sent and has not ended.
    pub(crate) fn find(&mut self, handle: u64) -> Option<(u32, Request, &mut Progress)> {
        #[allow(clippy::cast_possible_truncation)] // the halves of a 64-bit number
        let (index, generation) = (handle as u32, (handle >> 32) as u32);
        let slot = self.slots.get_mut(index as usize)?;
        (slot.in_use && slot.sent && slot.generation == generation).then_some((
            index,
            slot.request,
            &mut slot.progress,
        ))
    }

    /// The request of a slot in use, and what the replies have said.
    ///
    /// # Panics
    /// If there is no such slot.
    pub(crate) fn progress(&self, index: u32) -> (Request, &Progress) {
        let slot = &self.slots[index as usize];
        (slot.request, &slot.progress)
    }
}
