//! The engine's file table: which files it was given, how the kernel knows them, what they turned out
//! not to be able to do.
//!
//! Not here: opening files (`disk_image`).

use std::collections::VecDeque;

use disk_image::Alignment;

use crate::backend::Target;
use crate::core::flush_gate::FlushGate;
use crate::core::turn::{DIRECT_FRACTION, TURN_BYTES, Turn};
use crate::engine::{FileId, FileSpec};

/// Ops that wait in one of a file's queues, without allocating; a queue that had more keeps its room.
const USUAL_WAITING: usize = 64;
/// No call moves more than its file's turn has, so that one guest's large requests do not keep its worker from the
/// others. The rest is resumed.
const MAX_CACHED_CALL_BYTES: u64 = TURN_BYTES;
/// The same past the page cache. Far below `MAX_RW_COUNT`, which no call exceeds (read(2), NOTES).
const MAX_DIRECT_CALL_BYTES: u64 = TURN_BYTES * DIRECT_FRACTION;

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub spec: FileSpec,
    pub target: Target,
    /// Ops that wait for a bounce buffer, in order.
    pub waiting: VecDeque<u32>,
    /// Ops whose call found the kernel's queue full, in order.
    pub backlog: VecDeque<u32>,
    /// `fallocate` said so once; it will not be asked again to zero a range this way.
    pub cannot_punch: bool,
    pub cannot_zero_range: bool,
    pub flushes: FlushGate,
    pub turn: Turn,
    /// What its calls with the kernel take of its window, together.
    pub window_used: u64,
    /// No call moves more: the rest is resumed.
    pub most_bytes: u64,
}

impl OpenFile {
    pub fn new(spec: FileSpec, target: Target) -> Self {
        let mut file = Self {
            spec,
            target,
            waiting: VecDeque::with_capacity(USUAL_WAITING),
            backlog: VecDeque::with_capacity(USUAL_WAITING),
            cannot_punch: false,
            cannot_zero_range: false,
            flushes: FlushGate::new(),
            turn: Turn::new(),
            window_used: 0,
            most_bytes: 0,
        };
        file.most_bytes = file.longest_call_bytes();
        file
    }

    /// What a call moves at most while no other file's calls wait behind it: what its turn has.
    #[inline]
    pub fn longest_call_bytes(&self) -> u64 {
        if self.wants_alignment() { MAX_DIRECT_CALL_BYTES } else { MAX_CACHED_CALL_BYTES }
    }

    #[inline]
    pub fn alignment(&self) -> Alignment {
        self.spec.alignment
    }

    /// Whether the kernel is picky about addresses and lengths (`O_DIRECT`).
    #[inline]
    pub fn wants_alignment(&self) -> bool {
        self.spec.alignment.memory_bytes > 1 || self.spec.alignment.offset_bytes > 1
    }
}

#[derive(Debug, Default)]
pub(crate) struct FileTable {
    slots: Vec<Option<OpenFile>>,
}

impl FileTable {
    /// The lowest free index.
    pub fn next_index(&self) -> usize {
        self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len())
    }

    pub fn put(&mut self, index: usize, file: OpenFile) {
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, || None);
        }
        self.slots[index] = Some(file);
    }

    /// How many there were at once.
    pub fn places(&self) -> usize {
        self.slots.len()
    }

    /// This one, or all.
    pub fn chosen_mut(&mut self, only: Option<FileId>) -> impl Iterator<Item = &mut OpenFile> {
        let is_meant = move |index: usize| only.is_none_or(|only| only.0 as usize == index);
        let slots = self.slots.iter_mut().enumerate();
        slots.filter(move |(index, _)| is_meant(*index)).filter_map(|(_, file)| file.as_mut())
    }

    #[inline]
    pub fn get_mut(&mut self, file: FileId) -> Option<&mut OpenFile> {
        self.slots.get_mut(file.0 as usize)?.as_mut()
    }

    /// The file of an op. It is attached, because `detach` refuses while there are ops on a file.
    #[inline]
    pub fn at(&mut self, file: FileId) -> &mut OpenFile {
        match self.get_mut(file) {
            Some(file) => file,
            None => not_attached(file),
        }
    }

    pub fn is_attached(&self, file: FileId) -> bool {
        self.slots.get(file.0 as usize).is_some_and(Option::is_some)
    }

    pub fn take(&mut self, file: FileId) -> OpenFile {
        match self.slots.get_mut(file.0 as usize).and_then(Option::take) {
            Some(taken) => taken,
            None => not_attached(file),
        }
    }
}

#[cold]
fn not_attached(file: FileId) -> ! {
    unreachable!("{file:?} is not attached")
}
