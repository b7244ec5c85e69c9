//! Why connecting or reconnecting failed.

use std::io;
use std::path::PathBuf;

use super::memory::MemoryError;
use super::message::MessageError;
use super::queue::MakeQueueError;

/// Why connecting or reconnecting failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The queue size is invalid (virtio 1.3 §2.7), or larger than any device accepts.
    #[error("queue size {size} is not a power of two from {min} to {max}")]
    QueueSize {
        /** The requested queue size. */
        size: u16,
        /** The smallest possible size. */
        min: u16,
        /** The largest possible size. */
        max: u16,
    },
    /// No queues were requested.
    #[error("0 queues were requested, but the driver needs at least 1")]
    NoQueues,
    /// No process listens on the socket, or the listener does not accept the connection in time.
    #[error("cannot connect to {}", path.display())]
    Socket {
        /** The socket's path. */
        path: PathBuf,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
    /// A message failed.
    #[error("the connection could not be set up")]
    Message(#[from] MessageError),
    /// The back-end lacks a required feature.
    #[error("the back-end does not offer {feature} ({bit:#x}); its features are {offered:#x}")]
    Feature {
        /** The feature's name in its standard. */
        feature: &'static str,
        /** The feature's bit. */
        bit: u64,
        /** The offered bits. */
        offered: u64,
    },
    /// The device has fewer queues than requested.
    #[error("{wanted} queues were requested, but the device has only {available}")]
    Queues {
        /** The requested number of queues. */
        wanted: u16,
        /** Usable queues of the device. */
        available: u16,
    },
    /// The back-end provides no configuration.
    #[error("the back-end returned no configuration; the driver tried lengths of {asked_bytes:?} bytes")]
    NoConfig {
        /** The sizes that the driver tried. */
        asked_bytes: [usize; 4],
    },
    /// A value in the configuration is impossible.
    #[error("the device reports {field} {value}, which is impossible")]
    Config {
        /** Name of the field. */
        field: &'static str,
        /** The field's value. */
        value: u64,
    },
    /// After a reconnect, the back-end offers different features.
    #[error(
        "the new back-end offers features {is:#x}, but features {was:#x} are in use: it lacks {missing:#x} \
         (newly read-only: {read_only})"
    )]
    OtherFeatures {
        /** Features in use that are no longer offered. */
        missing: u64,
        /** Whether the device is read-only now and was not before. */
        read_only: bool,
        /** Features in use. */
        was: u64,
        /** Features that the back-end offers now. */
        is: u64,
    },
    /// After a reconnect, the disk has a different block size.
    #[error(
        "the disk's block size changed from {was_bytes} to {is_bytes} bytes while the back-end was \
         disconnected"
    )]
    OtherBlockSize {
        /** Previous value. */
        was_bytes: u32,
        /** The new value. */
        is_bytes: u32,
    },
    /// After a reconnect, the disk has lower limits than before.
    #[error("the disk's {field} fell from {was} to {is} while the back-end was disconnected")]
    Smaller {
        /** Name of the field. */
        field: &'static str,
        /** Previous value. */
        was: u64,
        /** The new value. */
        is: u64,
    },
    /// The answer to GET_INFLIGHT_FD does not match the request.
    #[error(
        "the back-end returned an in-flight log for {is} {what}, but the driver requested one for {wanted}"
    )]
    LogOfOthers {
        /** What is counted: queues, or descriptors per queue. */
        what: &'static str,
        /** The count in the reply. */
        is: u16,
        /** The count in the request. */
        wanted: u16,
    },
    /// No descriptor came with the answer to GET_INFLIGHT_FD.
    #[error("the back-end returned an in-flight log of {len_bytes} bytes without a file descriptor")]
    LogWithoutMemory {
        /** Length of the log. */
        len_bytes: u64,
    },
    /// The answer to GET_INFLIGHT_FD refers to bytes outside the file.
    #[error(
        "the back-end returned an in-flight log of {len_bytes} bytes from byte {offset_bytes} on, but its file has {file_bytes} bytes"
    )]
    LogOutside {
        /** Offset of the log in its file. */
        offset_bytes: u64,
        /** Length of the log. */
        len_bytes: u64,
        /** Size of the passed file. */
        file_bytes: u64,
    },
    /// A queue cannot be created.
    #[error("the queues cannot be created")]
    Queue(#[from] MakeQueueError),
    /// There is no memory for rings or buffers.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel has no file descriptors or threads left.
    #[error("the kernel refused a resource that the connection needs")]
    Resources(#[source] io::Error),
}
