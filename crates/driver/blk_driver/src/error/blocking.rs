//! Why a blocking call failed.

use super::memory::MemoryError;
use super::queue::{PushError, QueueError};
use crate::request::RequestError;

/// Why a blocking call failed.
#[derive(Debug, thiserror::Error)]
pub enum BlockingError {
    /// The queue refused the request.
    #[error(transparent)]
    Push(#[from] PushError),
    /// The queue cannot continue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The request failed.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The pool has no free buffer to copy through.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Other requests are in flight.
    #[error(
        "{in_flight} requests are in flight, but a blocking call needs an idle queue: take their completions first"
    )]
    Busy {
        /** Requests in flight, not counting those of blocking calls that timed out. */
        in_flight: usize,
    },
}
