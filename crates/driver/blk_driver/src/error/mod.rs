//! The errors of the crate. The files in this folder depend only on definitions, not on files with logic.
//!
//! See also: why a request failed (`request.rs`).

mod blocking;
mod connect;
mod memory;
mod message;
mod queue;

pub use blocking::BlockingError;
pub use connect::ConnectError;
pub use memory::MemoryError;
pub use message::MessageError;
pub use queue::{MakeQueueError, PushError, QueueError};

/// Formats an error and its causes on one line.
pub(crate) fn in_a_line(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line = format!("{line}: {cause}");
        source = cause.source();
    }
    line
}
