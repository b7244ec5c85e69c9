//! Records the core's calls to its backend: durability tests read which flush followed which write. A test double.
//!
//! The log numbers both moments of a call by one counter: when the backend took it, and when the core saw its result.

use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::Verb;
use crate::engine::FileId;

/// One call to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Which call.
    pub verb: Verb,
    /// On which file.
    pub file: FileId,
    /// Of the op that it is made for.
    pub token: u64,
    /// `RWF_*` for reads and writes, the mode for `fallocate`.
    pub flags: i32,
    /// First byte.
    pub offset_bytes: u64,
    /// Length asked for.
    pub len_bytes: u64,
    /// When it was issued, by the log's own counter.
    pub issued: u64,
    /// When its result was seen, by the same counter, and the result: bytes, 0, or a negated errno.
    pub completed: Option<(u64, i32)>,
}

#[derive(Debug, Default)]
struct Log {
    moments: u64,
    records: Vec<Record>,
}

/// A log shared between an engine and a test.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Log>>);

impl Recorder {
    /// An empty log.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Everything so far, in the order of issue.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.with(|log| log.records.clone())
    }

    /// Forgets everything so far. Only while nothing is in flight.
    pub fn clear(&self) {
        self.with(|log| log.records.clear());
    }

    /// A moment of the caller's own, by the log's counter: later than all it knows of, earlier than what follows.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.with(|log| {
            log.moments += 1;
            log.moments
        })
    }

    /// Returns the record's place.
    pub(crate) fn issued(&self, mut record: Record) -> usize {
        self.with(|log| {
            log.moments += 1;
            record.issued = log.moments;
            log.records.push(record);
            log.records.len() - 1
        })
    }

    pub(crate) fn completed(&self, place: usize, result: i32) {
        self.with(|log| {
            log.moments += 1;
            let moment = log.moments;
            if let Some(record) = log.records.get_mut(place) {
                record.completed = Some((moment, result));
            }
        });
    }

    fn with<R>(&self, act: impl FnOnce(&mut Log) -> R) -> R {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
