//! Why there is no connection.
//!
//! Not here: what can go wrong with one message (`wire.rs`).

use std::io;
use std::path::PathBuf;

use super::wire::MessageError;
use crate::error::MakeQueueError;
use crate::memory::MemoryError;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Not a queue size (virtio 1.3 §2.7), or larger than any device here takes.
    #[error("queue size {size}: a power of two from {min} to {max} is needed")]
    QueueSize {
        /** As given. */
        size: u16,
        /** Smallest. */
        min: u16,
        /** Largest. */
        max: u16,
    },
    /// A device without queues is of no use.
    #[error("0 queues wanted, at least 1 is needed")]
    NoQueues,
    /// Nobody listens there, or takes no connection in time.
    #[error("cannot connect to {}", path.display())]
    Socket {
        /** As given. */
        path: PathBuf,
        /** From the kernel. */
        #[source]
        source: io::Error,
    },
    /// A message failed.
    #[error("the back-end does not go through with it")]
    Message(#[from] MessageError),
    /// Something that cannot be done without.
    #[error("the back-end does not offer {feature} ({bit:#x}), its features are {offered:#x}")]
    Feature {
        /** By the name in its standard. */
        feature: &'static str,
        /** The same. */
        bit: u64,
        /** As received. */
        offered: u64,
    },
    /// Fewer queues than wanted.
    #[error("{wanted} queues wanted, the device has {available}")]
    Queues {
        /** As given. */
        wanted: u16,
        /** What can be used of the device. */
        available: u16,
    },
    /// The back-end gives no configuration.
    #[error("the back-end gives none of {asked_bytes:?} bytes of configuration")]
    NoConfig {
        /** Sizes that were tried. */
        asked_bytes: [usize; 4],
    },
    /// Something in the configuration that no device can have.
    #[error("the device says {field} {value}, which cannot be")]
    Config {
        /** Its name. */
        field: &'static str,
        /** As received. */
        value: u64,
    },
    /// The back-end that came back is not what it was.
    #[error(
        "the back-end came back with features {is:#x}, {was:#x} are in use: {missing:#x} are missing, and read-only: {read_only}"
    )]
    OtherFeatures {
        /** In use, not offered now. */
        missing: u64,
        /** Read-only now, and was not. */
        read_only: bool,
        /** In use. */
        was: u64,
        /** As received. */
        is: u64,
    },
    /// Requests were made for another block size.
    #[error("the disk came back with blocks of {is_bytes} bytes, it had {was_bytes}")]
    OtherBlockSize {
        /** Before. */
        was_bytes: u32,
        /** As received. */
        is_bytes: u32,
    },
    /// The disk that came back takes less than it did.
    #[error("the disk came back with {field} {is}, it had {was}")]
    Smaller {
        /** What is less. */
        field: &'static str,
        /** Before. */
        was: u64,
        /** As received. */
        is: u64,
    },
    /// The answer to GET_INFLIGHT_FD is not about what was asked for.
    #[error("the back-end gives an in-flight log for {is} {what}, it was asked for {wanted}")]
    LogOfOthers {
        /** Of which there is another number. */
        what: &'static str,
        /** As received. */
        is: u16,
        /** As sent. */
        wanted: u16,
    },
    /// No descriptor came with the answer to GET_INFLIGHT_FD.
    #[error("the back-end gives an in-flight log of {len_bytes} bytes and no file descriptor for it")]
    LogWithoutMemory {
        /** As received. */
        len_bytes: u64,
    },
    /// The answer to GET_INFLIGHT_FD names bytes that are not there.
    #[error(
        "the back-end gives an in-flight log of {len_bytes} bytes from byte {offset_bytes} on, its memory has {file_bytes}"
    )]
    LogOutside {
        /** As received. */
        offset_bytes: u64,
        /** As received. */
        len_bytes: u64,
        /** Size of what was passed. */
        file_bytes: u64,
    },
    /// A queue cannot be made.
    #[error("no queue can be made")]
    Queue(#[from] MakeQueueError),
    /// Memory for rings or buffers.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// No descriptors or threads.
    #[error("no resources for a connection")]
    Resources(#[source] io::Error),
}

/// An error and its causes on one line.
pub(super) fn in_a_line(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line = format!("{line}: {cause}");
        source = cause.source();
    }
    line
}
