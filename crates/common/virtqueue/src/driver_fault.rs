//! Errors of the driver half: a chain that does not fit, or a device that broke the ring.

use guest_mem::AccessError;

/// Why buffers were not added; the ring is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The chain has no buffers; at least one is required.
    #[error("no buffers to add")]
    Empty,
    /// The chain has more buffers than a device must accept.
    #[error("{needed} buffers, but a chain has at most {limit}")]
    TooLong {
        /** Number of buffers in the chain. */
        needed: usize,
        /** The queue size, or what [`crate::DriverQueue::with_indirect_limit`] allows. */
        limit: u16,
    },
    /// The ring has too few free descriptors; some requests have to complete first.
    #[error("{needed} descriptors needed, but only {free} are free")]
    Full {
        /** Number of descriptors needed. */
        needed: usize,
        /** Number of free descriptors. */
        free: u16,
    },
    /// The device did not offer `VIRTIO_F_INDIRECT_DESC`.
    #[error("indirect descriptors were not negotiated")]
    IndirectNotNegotiated,
    /// The table's address is not in memory.
    #[error("indirect table cannot be written")]
    Table(#[source] AccessError),
}

/// The device broke the used ring: reset the queue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverFault {
    /// The device used more entries than were available.
    #[error("used index jumped from {next_used} to {used_idx}, but only {in_flight} chains are in flight")]
    UsedIndexJump {
        /** The used index in the ring. */
        used_idx: u16,
        /** Index of the next used entry that the driver will take. */
        next_used: u16,
        /** Number of chains in flight. */
        in_flight: u16,
    },
    /// The id is not the index of a descriptor of this queue.
    #[error("used id {id} is outside the descriptor table (queue size {queue_size})")]
    IdOutOfRange {
        /** The buffer id in the descriptor. */
        id: u32,
        /** The queue size, in entries. */
        queue_size: u16,
    },
    /// The device does not hold a chain with this head.
    #[error("used id {id} is not in flight")]
    NotInFlight {
        /** The buffer id in the descriptor. */
        id: u16,
    },
    /// The device claims more bytes than the buffers hold.
    #[error("device claims {written_bytes} bytes written, but the buffers have room for {writable_bytes}")]
    WrittenTooMuch {
        /** The length in the used ring. */
        written_bytes: u32,
        /** Total size of the writable buffers. */
        writable_bytes: u64,
    },
}
