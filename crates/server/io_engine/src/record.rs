//! Test double: records the core's calls to its backend, so that durability tests can check which flush followed which
//! write.
//!
//! One counter numbers both the moment when the backend took a call and the moment when the core saw its result.

use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::Verb;
use crate::engine::FileId;

/// One call to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The kind of call.
    pub verb: Verb,
    /// The file of the call.
    pub file: FileId,
    /// The token of the op that the call belongs to.
    pub token: u64,
    /// `RWF_*` for reads and writes, the mode for `fallocate`.
    pub flags: i32,
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Requested length.
    pub len_bytes: u64,
    /// When the core issued the call, by the log's counter.
    pub issued: u64,
    /// When the core saw the call's result, by the same counter, and that result: a byte count, 0, or a negated errno.
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

    /// All records, in the order of issue.
    #[must_use]
    pub fn records(&self) -> Vec<Record> {
        self.with(|log| log.records.clone())
    }

    /// Removes all records. Only allowed while no call is in flight.
    pub fn clear(&self) {
        self.with(|log| log.records.clear());
    }

    /// Returns the next value of the log's counter: later than all recorded events, earlier than all that follow.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.with(|log| {
            log.moments += 1;
            log.moments
        })
    }

    /// Adds a record, and returns its index.
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
