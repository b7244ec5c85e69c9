//! The engine's file table: the attached files, their kernel targets, and the operations that each file has refused.

use std::collections::VecDeque;

use disk_image::Alignment;

use crate::backend::Target;
use crate::core::flush_gate::FlushGate;
use crate::core::turn::{DIRECT_FRACTION, TURN_BYTES, Turn};
use crate::engine::{FileId, FileSpec};

/// Initial capacity of each of a file's wait queues. A queue that grew keeps its capacity.
const USUAL_WAITING: usize = 64;
/// Longest call through the page cache: one turn's bytes, so that one guest's large requests do not delay the other
/// guests of its worker. The engine resumes the op with the rest.
const MAX_CACHED_CALL_BYTES: u64 = TURN_BYTES;
/// Longest call with `O_DIRECT`. Far below `MAX_RW_COUNT`, the kernel's own limit (read(2), NOTES).
const MAX_DIRECT_CALL_BYTES: u64 = TURN_BYTES * DIRECT_FRACTION;

#[derive(Debug)]
pub(crate) struct OpenFile {
    pub spec: FileSpec,
    pub target: Target,
    /// Ops that wait for a bounce buffer, in order.
    pub waiting: VecDeque<u32>,
    /// Ops whose call found the backend's queue full, in order.
    pub backlog: VecDeque<u32>,
    /// `fallocate` has refused to punch a hole in this file, so the engine no longer tries.
    pub cannot_punch: bool,
    pub cannot_zero_range: bool,
    pub flushes: FlushGate,
    pub turn: Turn,
    /// Sum of the window costs of the file's calls in flight.
    pub window_used: u64,
    /// Longest call. The engine resumes the op with the rest.
    pub most_bytes: u64,
    /// A write's own call can make it durable. Otherwise a sync follows the write.
    pub has_durable_writes: bool,
    /// A discard has a call of its own; otherwise it punches a hole.
    pub has_discard: bool,
}

impl OpenFile {
    pub fn new(spec: FileSpec, target: Target, has_durable_writes: bool) -> Self {
        let mut file = Self {
            has_discard: spec.backing.file().is_none(),
            has_durable_writes,
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

    /// Longest call while no other file's calls wait behind it: one turn's bytes.
    #[inline]
    pub fn longest_call_bytes(&self) -> u64 {
        let usual = if self.copies_nothing() { MAX_DIRECT_CALL_BYTES } else { MAX_CACHED_CALL_BYTES };
        self.spec.backing.longest_call_bytes().map_or(usual, |most| most.min(usual))
    }

    #[inline]
    pub fn alignment(&self) -> Alignment {
        self.spec.alignment
    }

    /// Whether calls move data without copying it (`O_DIRECT`). Sending and receiving copies.
    #[inline]
    pub fn copies_nothing(&self) -> bool {
        self.wants_alignment() && self.spec.backing.file().is_some()
    }

    /// Whether the storage requires aligned addresses or lengths: the kernel for `O_DIRECT`, or a server that refuses
    /// parts of its blocks.
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

    /// Length of the table, free entries included.
    pub fn places(&self) -> usize {
        self.slots.len()
    }

    /// The file `only`, or all files if it is `None`.
    pub fn chosen_mut(&mut self, only: Option<FileId>) -> impl Iterator<Item = &mut OpenFile> {
        let is_meant = move |index: usize| only.is_none_or(|only| only.0 as usize == index);
        let slots = self.slots.iter_mut().enumerate();
        slots.filter(move |(index, _)| is_meant(*index)).filter_map(|(_, file)| file.as_mut())
    }

    #[inline]
    pub fn get_mut(&mut self, file: FileId) -> Option<&mut OpenFile> {
        self.slots.get_mut(file.0 as usize)?.as_mut()
    }

    /// The file of an op. It is attached, because `detach` panics while ops on a file are in flight.
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
