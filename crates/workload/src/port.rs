//! What a thread needs of a target: take requests, give back completions, hold their buffers.
//!
//! `push … submit → reap` on slots: each has one buffer of a block, and at most one request in flight.
//!
//! Not here: the ways there (`port_file.rs`, `port_queue.rs`, `port_shared.rs`).

use std::time::Duration;

use crate::measured::QueueCounts;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Into the slot's buffer.
    Read,
    /// From it.
    Write,
    /// Everything written so far becomes durable.
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
    /// Why it failed, for people.
    pub result: Result<(), String>,
}

/// The target as a whole is broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PortError(pub String);

impl PortError {
    /// With everything behind it.
    pub fn because(what: &str, error: &dyn std::error::Error) -> Self {
        let mut text = format!("{what}: {error}");
        let mut cause = error.source();
        while let Some(error) = cause {
            let words = error.to_string();
            // Some errors repeat their cause in their own words.
            if !text.ends_with(&words) {
                text = format!("{text}: {words}");
            }
            cause = error.source();
        }
        Self(text)
    }
}

/// One thread's way to the target.
pub(crate) trait Port {
    /// Takes a request; it may not start before [`Port::submit`].
    fn push(&mut self, io: Io) -> Result<(), PortError>;

    /// Starts what was pushed, in order; returns how many requests this call started. The others wait for room and
    /// for the next call.
    fn submit(&mut self) -> Result<usize, PortError>;

    /// Appends what has ended. With a limit it sleeps so long if there is nothing.
    fn reap(&mut self, done: &mut Vec<Done>, limit: Option<Duration>) -> Result<(), PortError>;

    /// Whether a request is over when it is submitted.
    fn is_synchronous(&self) -> bool {
        false
    }

    /// Puts a block into the slot's buffer.
    fn fill(&mut self, slot: u32, block: &[u8]) -> Result<(), PortError>;

    /// Copies the slot's buffer.
    fn read(&self, slot: u32, block: &mut [u8]) -> Result<(), PortError>;

    /// Of a queue that this thread has to itself.
    fn counts(&self) -> QueueCounts {
        QueueCounts::default()
    }
}
