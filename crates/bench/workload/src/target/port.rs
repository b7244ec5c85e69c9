//! A thread's interface to a target: submits requests, returns completions, holds the buffers.
//!
//! `push … submit → reap` on slots: each slot has one buffer of one block, and at most one request in flight.

use std::time::Duration;

use crate::measured::QueueCounts;

/// The kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Read into the slot's buffer.
    Read,
    /// Write from the slot's buffer.
    Write,
    /// Make everything written so far durable.
    Flush,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Io {
    pub slot: u32,
    pub ask: Ask,
    pub offset_bytes: u64,
}

/// One completion.
#[derive(Debug)]
pub(crate) struct Done {
    pub slot: u32,
    /// The error, as text for the user.
    pub result: Result<(), String>,
}

/// The target as a whole is broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PortError(pub String);

impl PortError {
    /// The error with all its causes.
    pub fn because(what: &str, error: &dyn std::error::Error) -> Self {
        let mut text = format!("{what}: {error}");
        let mut cause = error.source();
        while let Some(error) = cause {
            let words = error.to_string();
            // Some errors repeat their cause in their own text.
            if !text.ends_with(&words) {
                text = format!("{text}: {words}");
            }
            cause = error.source();
        }
        Self(text)
    }
}

/// One thread's access to the target.
pub(crate) trait Port {
    /// Takes a request; it starts at [`Port::submit`] at the earliest.
    fn push(&mut self, io: Io) -> Result<(), PortError>;

    /// Starts the pushed requests in order, and returns how many this call started. The remaining requests wait for
    /// room until the next call.
    fn submit(&mut self) -> Result<usize, PortError>;

    /// Appends completed requests. If there are none and a limit is given, sleeps for up to the limit.
    fn reap(&mut self, done: &mut Vec<Done>, limit: Option<Duration>) -> Result<(), PortError>;

    /// Whether requests complete within `submit`.
    fn is_synchronous(&self) -> bool {
        false
    }

    /// Writes a block into the slot's buffer.
    fn fill(&mut self, slot: u32, block: &[u8]) -> Result<(), PortError>;

    /// Copies a block out of the slot's buffer.
    fn read(&self, slot: u32, block: &mut [u8]) -> Result<(), PortError>;

    /// Counts of a queue that this thread does not share.
    fn counts(&self) -> QueueCounts {
        QueueCounts::default()
    }
}
