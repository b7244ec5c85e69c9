//! Why a queue cannot be created, does not take a request, or cannot continue.

use virtqueue::{AddError, DriverFault};

/// Why a queue cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum MakeQueueError {
    /// The ring is refused, for example because of its size.
    #[error(transparent)]
    Ring(#[from] virtqueue::RingFault),
    /// The queue's area is not inside its private region.
    #[error(transparent)]
    Access(#[from] guest_mem::AccessError),
    /// The memory table refuses the queue's private region.
    #[error(transparent)]
    Memory(#[from] guest_mem::MemoryError),
    /// The eventfd for completion signals cannot be created.
    #[error("cannot create the eventfd that signals completions")]
    Signal(#[source] std::io::Error),
}

/// Why a request was not taken; the queue is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The queue is full: take completions first.
    #[error("the queue is full ({in_flight} requests are in flight): take completions first")]
    Full {
        /** Number of requests in flight. */
        in_flight: usize,
    },
    /// The ring refuses the request.
    #[error("the ring does not accept the request")]
    Ring(#[source] AddError),
    /// A buffer lies outside registered memory.
    #[error("buffer of {len_bytes} bytes at {addr:#x} is not in registered memory")]
    NotRegistered {
        /** Guest address of the buffer. */
        addr: u64,
        /** Length of the buffer. */
        len_bytes: u32,
    },
    /// A buffer is empty.
    #[error("buffer at {addr:#x} is empty")]
    EmptyBuffer {
        /** Guest address of the buffer. */
        addr: u64,
    },
    /// The request has more buffers than the device takes.
    #[error("the request has {buffers} buffers, but the device accepts at most {max}")]
    TooManyBuffers {
        /** Number of buffers. */
        buffers: usize,
        /** Limit of the device and the queue. */
        max: u16,
    },
    /// The data is empty, too long, or not a whole number of sectors.
    #[error(
        "the request has {len_bytes} bytes of data; the length must be a multiple of {sector_bytes}, from {sector_bytes} to {max_bytes}"
    )]
    DataLength {
        /** Total length of the buffers. */
        len_bytes: u64,
        /** Length of a sector. */
        sector_bytes: u64,
        /** Largest possible length. */
        max_bytes: u64,
    },
    /// The buffer is too small for the serial.
    #[error("the buffer for the device's id has {len_bytes} bytes, but the id has {min_bytes}")]
    IdLength {
        /** Length of the buffer. */
        len_bytes: u32,
        /** Length of the serial. */
        min_bytes: u32,
    },
    /// The device does not offer this request.
    #[error("the device does not offer {what}")]
    NotOffered {
        /** Discard or write zeroes. */
        what: &'static str,
    },
    /// The device is read-only.
    #[error("the device is read-only")]
    ReadOnly,
    /// No segments, or too many.
    #[error("the {what} request has {count} segments; 1 to {max} are allowed")]
    SegmentCount {
        /** Discard or write zeroes. */
        what: &'static str,
        /** Number of segments. */
        count: usize,
        /** Limit of the device and the driver. */
        max: usize,
    },
    /// A segment is too long.
    #[error("the {what} request has a segment of {sectors} sectors, but the device accepts at most {max}")]
    SegmentLength {
        /** Discard or write zeroes. */
        what: &'static str,
        /** Length of the segment, in sectors. */
        sectors: u32,
        /** The device's limit. */
        max: u32,
    },
    /// The queue cannot continue.
    #[error("the queue accepts no more requests")]
    Dead(#[source] QueueError),
}

/// The queue cannot continue; every request in flight has ended with [`crate::RequestError::Lost`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The device broke the ring.
    #[error("queue {queue}: the device broke the ring")]
    Device {
        /** The queue's index. */
        queue: u16,
        /** How it broke the ring. */
        #[source]
        fault: DriverFault,
    },
    /// The back-end has disconnected and the driver does not wait for another one.
    #[error("queue {queue}: the back-end has disconnected")]
    Disconnected {
        /** The queue's index. */
        queue: u16,
    },
    /// `poll` failed.
    #[error("queue {queue}: cannot wait for completions: {errno}")]
    Wait {
        /** The queue's index. */
        queue: u16,
        /** The kernel's error. */
        errno: rustix::io::Errno,
    },
}
