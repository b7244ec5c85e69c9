//! Why a queue cannot be made, does not take a request, or cannot go on.
//!
//! Not here: how a request failed (`request.rs`), why there is no connection (`device.rs`).

use virtqueue::{AddError, DriverFault};

/// Why a queue cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeQueueError {
    /// Its size.
    #[error(transparent)]
    Ring(#[from] virtqueue::RingFault),
    /// Its own region.
    #[error(transparent)]
    Access(#[from] guest_mem::AccessError),
    /// Its own region.
    #[error(transparent)]
    Memory(#[from] guest_mem::MemoryError),
    /// No descriptor for its completions.
    #[error("no descriptor to signal completions with")]
    Signal(#[source] std::io::Error),
}

/// Why a request was not taken; the queue is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// As many requests are in flight as the queue holds: take completions first.
    #[error("the queue is full: {in_flight} requests are in flight")]
    Full {
        /** Requests. */
        in_flight: usize,
    },
    /// The ring does not take it.
    #[error("the ring does not take the request")]
    Ring(#[source] AddError),
    /// A buffer that is not in registered memory.
    #[error("buffer of {len_bytes} bytes at {addr:#x} is not in registered memory")]
    NotRegistered {
        /** As given. */
        addr: u64,
        /** As given. */
        len_bytes: u32,
    },
    /// A buffer without bytes.
    #[error("buffer at {addr:#x} is empty")]
    EmptyBuffer {
        /** As given. */
        addr: u64,
    },
    /// More buffers than the device takes.
    #[error("{buffers} buffers, the device takes at most {max} per request")]
    TooManyBuffers {
        /** As given. */
        buffers: usize,
        /** Of device and queue. */
        max: u16,
    },
    /// Not whole sectors, none, or too many.
    #[error(
        "{len_bytes} bytes of data, a request has a multiple of {sector_bytes}, from that to {max_bytes}"
    )]
    DataLength {
        /** All buffers together. */
        len_bytes: u64,
        /** A sector. */
        sector_bytes: u64,
        /** Most of all. */
        max_bytes: u64,
    },
    /// No room for the serial.
    #[error("{len_bytes} bytes for the device's id, which has {min_bytes}")]
    IdLength {
        /** As given. */
        len_bytes: u32,
        /** As the device stores them. */
        min_bytes: u32,
    },
    /// The device has no such request.
    #[error("the device does not offer {what}")]
    NotOffered {
        /** Discard or write zeroes. */
        what: &'static str,
    },
    /// The device takes no writes.
    #[error("the device is read-only")]
    ReadOnly,
    /// No segments, or too many.
    #[error("{what} of {count} segments, from 1 to {max} are possible")]
    SegmentCount {
        /** Discard or write zeroes. */
        what: &'static str,
        /** As given. */
        count: usize,
        /** Of device and driver. */
        max: usize,
    },
    /// A segment that is too long.
    #[error("{what} of {sectors} sectors in one segment, the device takes at most {max}")]
    SegmentLength {
        /** Discard or write zeroes. */
        what: &'static str,
        /** As given. */
        sectors: u32,
        /** The device's. */
        max: u32,
    },
    /// The queue cannot go on.
    #[error("the queue takes no more requests")]
    Dead(#[source] QueueError),
}

/// The queue cannot go on; everything in flight has ended with [`crate::RequestError::Lost`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The device broke the ring.
    #[error("queue {queue}: the device broke the ring")]
    Device {
        /** Its index. */
        queue: u16,
        /** What it did. */
        #[source]
        fault: DriverFault,
    },
    /// The back-end is gone and will not be waited for.
    #[error("queue {queue}: the back-end is gone")]
    Disconnected {
        /** Its index. */
        queue: u16,
    },
    /// The kernel refused to poll.
    #[error("queue {queue}: cannot wait for completions: {errno}")]
    Wait {
        /** Its index. */
        queue: u16,
        /** From the kernel. */
        errno: rustix::io::Errno,
    },
}
