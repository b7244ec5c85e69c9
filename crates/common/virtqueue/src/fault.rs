//! Faults of the driver, classified by how much of the queue they affect.
//!
//! - [`RingFault`]: the indices cannot be trusted any more; this queue stops until it is reset.
//! - [`ChainFault`]: one request is unusable; the device returns it with length 0 and the queue continues.

use std::fmt;

use guest_mem::AccessError;

use crate::log::LogFault;

/// One of the three areas of a virtqueue (virtio 1.3 §2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingPart {
    /// Descriptor table (descriptor area).
    Descriptors,
    /// Available ring (driver area).
    Avail,
    /// Used ring (device area).
    Used,
    /// The packed ring (descriptor area).
    PackedRing,
    /// A packed ring's driver event suppression structure (driver area).
    DriverEvent,
    /// A packed ring's device event suppression structure (device area).
    DeviceEvent,
}

impl fmt::Display for RingPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptors => "descriptor table",
            Self::Avail => "available ring",
            Self::Used => "used ring",
            Self::PackedRing => "packed ring",
            Self::DriverEvent => "driver event suppression structure",
            Self::DeviceEvent => "device event suppression structure",
        })
    }
}

/// The ring itself is broken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// The queue size is not a power of two, or it is outside the limits.
    #[error("queue size {queue_size} is not a power of two from {min} to {max}")]
    BadQueueSize {
        /** The invalid queue size. */
        queue_size: u16,
        /** [`crate::MIN_QUEUE_SIZE`]. */
        min: u16,
        /** [`crate::MAX_QUEUE_SIZE`]. */
        max: u16,
    },
    /// A part of the ring is misaligned, unmapped, or across two memory regions.
    #[error("{part} cannot be mapped")]
    Part {
        /** The part of the ring. */
        part: RingPart,
        /** The reason. */
        #[source]
        source: AccessError,
    },
    /// The driver made more chains available than the queue can hold.
    #[error(
        "available index jumped from {next_avail} to {avail_idx}, more than the {queue_size} entries of the queue"
    )]
    AvailIndexJump {
        /** The available index in the ring. */
        avail_idx: u16,
        /** Index of the next entry that the device will take. */
        next_avail: u16,
        /** The queue size, in entries. */
        queue_size: u16,
    },
    /// An entry of the available ring is not the index of a descriptor.
    #[error("head {head} is outside the descriptor table (queue size {queue_size})")]
    HeadOutOfRange {
        /** The head in the available ring. */
        head: u16,
        /** The queue size, in entries. */
        queue_size: u16,
    },
    /// A chain was made available again before it was used. Raised by the owner of the in-flight slots.
    #[error("head {head} was made available again while it is in flight")]
    HeadInFlight {
        /** The head in the available ring. */
        head: u16,
    },
    /// A packed ring's chain has no end. Only the last descriptor holds the buffer id, so the id is unknown.
    #[error("descriptor chain at slot {slot} is longer than the {room} descriptors that are not in flight")]
    EndlessChain {
        /** Slot of the chain's first descriptor. */
        slot: u16,
        /** The queue size minus the descriptors in flight. */
        room: u16,
    },
    /// A packed ring's buffer id is not below the queue size; no driver needs such an id.
    #[error("buffer id {id} is not below the queue size {queue_size}")]
    IdOutOfRange {
        /** The buffer id in the descriptor. */
        id: u16,
        /** The queue size, in entries. */
        queue_size: u16,
    },
    /// A packed ring's buffer id belongs to a chain that is still in flight.
    #[error("buffer id {id} was made available again while it is in flight")]
    IdInFlight {
        /** The buffer id in the descriptor. */
        id: u16,
    },
    /// An impossible position: a slot is outside the ring, or descriptors were taken but not used.
    #[error(
        "ring base {base:#010x} is not a position of this packed ring with {queue_size} entries; a new ring starts at 0x80008000"
    )]
    BadBase {
        /** The base that the front-end sent. */
        base: u32,
        /** The queue size, in entries. */
        queue_size: u16,
    },
    /// The in-flight log of the previous device is inconsistent.
    #[error(transparent)]
    Log(#[from] LogFault),
    /// The packed ring shows that a device moved past the position: requests would run twice.
    #[error(
        "ring base {base:#010x} is stale: slot {slot} of the packed ring has been used since, and the current position is not recorded in memory, so the guest must reset the device"
    )]
    StaleBase {
        /** The base that the front-end sent. */
        base: u32,
        /** The slot that shows the later use. */
        slot: u16,
    },
}

/// One unusable descriptor chain. Its end is unknown, so no status can be stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// `next` is not the index of a descriptor in the table.
    #[error("next descriptor {next} is outside its table of {table_entries} entries")]
    NextOutOfRange {
        /** The index in the `next` field. */
        next: u16,
        /** Number of entries of the descriptor table or the indirect table. */
        table_entries: u16,
    },
    /// The chain has more descriptors than the queue, or more than an indirect table may have. A loop is also
    /// reported this way (virtio 1.3 §2.7.5.3.1).
    #[error("descriptor chain is longer than the {limit} descriptors allowed")]
    TooLong {
        /** The limit, in descriptors. */
        limit: u16,
    },
    /// A device-readable descriptor follows a device-writable one (virtio 1.3 §2.7.4.2).
    #[error("device-readable descriptor follows a device-writable one")]
    ReadableAfterWritable,
    /// A malformed indirect table.
    #[error(transparent)]
    Indirect(#[from] IndirectFault),
}

/// A fault in an indirect descriptor or its table (virtio 1.3 §2.7.5.3).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndirectFault {
    /// The driver did not accept `VIRTIO_F_INDIRECT_DESC`.
    #[error("indirect descriptor, but the feature was not negotiated")]
    NotNegotiated,
    /// An indirect descriptor is inside an indirect table.
    #[error("indirect descriptor inside an indirect table")]
    Nested,
    /// A chain mixes indirect and direct descriptors, which packed rings do not allow (virtio 1.3 §2.8.5).
    #[error("indirect descriptor in a chain with direct descriptors")]
    Mixed,
    /// A descriptor has both NEXT and INDIRECT.
    #[error("indirect descriptor has a next descriptor, which is not allowed")]
    WithNext,
    /// The table has no entries.
    #[error("indirect table is empty")]
    Empty,
    /// The length is not a whole number of descriptors.
    #[error("indirect table has {len_bytes} bytes, not a multiple of 16")]
    Length {
        /** Length of the table. */
        len_bytes: u32,
    },
    /// The table has more entries than a chain may have.
    #[error("indirect table has {entries} entries, more than the {limit} descriptors allowed")]
    TooLarge {
        /** Number of entries of the table. */
        entries: u32,
        /** The limit, in descriptors. */
        limit: u16,
    },
    /// An entry that the chain uses is outside guest memory.
    #[error("indirect table cannot be read")]
    Unmapped(#[source] AccessError),
}

/// Why [`crate::DeviceQueue::pop`] returns no chain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PopError {
    /// The queue has to stop.
    #[error(transparent)]
    Ring(#[from] RingFault),
    /// The device must return this chain with length 0.
    #[error("chain {tag}: {fault}")]
    Chain {
        /** The tag for `push_used`. */
        tag: u16,
        /** The chain's fault. */
        fault: ChainFault,
    },
}
