//! Why the driver half refuses: a chain that does not fit, or a device that broke the ring.
//!
//! Not here: what a driver can do wrong (`fault.rs`).

use guest_mem::AccessError;

/// Why buffers were not added; the ring is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// A chain has at least one buffer.
    #[error("no buffers to add")]
    Empty,
    /// Longer than any device must accept.
    #[error("{needed} buffers, a chain has at most {limit}")]
    TooLong {
        /** Buffers given. */
        needed: usize,
        /** The queue size, or what [`crate::DriverQueue::with_indirect_limit`] allows. */
        limit: u16,
    },
    /// Some requests have to complete first.
    #[error("{needed} descriptors needed, {free} are free")]
    Full {
        /** Descriptors. */
        needed: usize,
        /** Descriptors. */
        free: u16,
    },
    /// The device did not offer `VIRTIO_F_INDIRECT_DESC`.
    #[error("indirect descriptors were not negotiated")]
    IndirectNotNegotiated,
    /// The place for the table is not in memory.
    #[error("indirect table cannot be written")]
    Table(#[source] AccessError),
}

/// The device broke the used ring: reset the queue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverFault {
    /// More used than was available.
    #[error("used index jumped to {used_idx} from {next_used} with {in_flight} chains in flight")]
    UsedIndexJump {
        /** As read. */
        used_idx: u16,
        /** Where we are. */
        next_used: u16,
        /** Available and not used. */
        in_flight: u16,
    },
    /// Not a descriptor of this queue.
    #[error("used id {id} is outside the descriptor table (queue size {queue_size})")]
    IdOutOfRange {
        /** As read. */
        id: u32,
        /** In entries. */
        queue_size: u16,
    },
    /// No chain with this head is with the device.
    #[error("used id {id} is not in flight")]
    NotInFlight {
        /** As read. */
        id: u16,
    },
    /// More stored than there was room for.
    #[error("device claims {written_bytes} bytes written, the buffers have room for {writable_bytes}")]
    WrittenTooMuch {
        /** As read. */
        written_bytes: u32,
        /** What was given. */
        writable_bytes: u64,
    },
}
