//! Why there is no connection.

use std::io;
use std::path::PathBuf;

use super::memory::MemoryError;
use super::message::MessageError;
use super::queue::MakeQueueError;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The number is no valid queue size (virtio 1.3 §2.7), or it is larger than any device accepts.
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
    #[error("0 queues requested, but at least 1 is needed")]
    NoQueues,
    /// There is no listener, or it does not accept the connection in time.
    #[error("cannot connect to {}", path.display())]
    Socket {
        /** The socket's path. */
        path: PathBuf,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
    /// A message failed.
    #[error("the back-end does not complete it")]
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
    #[error("{wanted} queues requested, but the device has {available}")]
    Queues {
        /** The requested number of queues. */
        wanted: u16,
        /** Usable queues of the device. */
        available: u16,
    },
    /// The back-end gives no configuration.
    #[error("the back-end returns none of {asked_bytes:?} bytes of configuration")]
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
    /// The back-end that came back has other features than before.
    #[error(
        "the back-end came back with features {is:#x}, but {was:#x} are in use: {missing:#x} are missing, and read-only: {read_only}"
    )]
    OtherFeatures {
        /** In use, but not offered any more. */
        missing: u64,
        /** Whether the device is read-only now and was not before. */
        read_only: bool,
        /** Features in use. */
        was: u64,
        /** Features that the back-end offers now. */
        is: u64,
    },
    /// The disk came back with another block size.
    #[error("the disk came back with blocks of {is_bytes} bytes, but had {was_bytes}")]
    OtherBlockSize {
        /** Previous value. */
        was_bytes: u32,
        /** The new value. */
        is_bytes: u32,
    },
    /// The disk that came back has lower limits than before.
    #[error("the disk came back with {field} {is}, but had {was}")]
    Smaller {
        /** Name of the field. */
        field: &'static str,
        /** Previous value. */
        was: u64,
        /** The new value. */
        is: u64,
    },
    /// The answer to GET_INFLIGHT_FD does not match the request.
    #[error("the back-end returned an in-flight log for {is} {what}, but the driver requested {wanted}")]
    LogOfOthers {
        /** What the number counts. */
        what: &'static str,
        /** The number in the reply. */
        is: u16,
        /** The number in the request. */
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
        "the back-end returned an in-flight log of {len_bytes} bytes from byte {offset_bytes} on, but its memory has {file_bytes}"
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
    #[error("no queue can be created")]
    Queue(#[from] MakeQueueError),
    /// No memory for rings or buffers.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// No descriptors or threads.
    #[error("no resources for a connection")]
    Resources(#[source] io::Error),
}
