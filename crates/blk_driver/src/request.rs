//! What a user asks of the device, and what comes back.
//!
//! Spec: virtio 1.3 §5.2.6. Not here: how a request lies in memory (`queue.rs`).

use std::time::Instant;

use guest_mem::GuestRange;
use virtio_blk::Segment;

/// When a write counts as done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// When the device has it: durable after the next flush.
    #[default]
    Cached,
    /// When it is durable: the write is followed by a flush, and completes with that.
    Durable,
}

/// One thing to do. Buffers are ranges of registered memory ([`crate::Pool`], [`crate::UserMemory`]).
#[derive(Clone, Copy, Debug)]
pub enum Work<'r> {
    /// From `sector` (of 512 bytes) on into `data`, buffer after buffer; a multiple of 512 bytes in all.
    Read {
        /** First sector. */
        sector: u64,
        /** Where to. */
        data: &'r [GuestRange],
    },
    /// From `data` to `sector` on.
    Write {
        /** First sector. */
        sector: u64,
        /** Where from. */
        data: &'r [GuestRange],
        /** When it is done. */
        durability: Durability,
    },
    /// Everything that completed before becomes durable.
    Flush,
    /// The device may forget what is in these sectors.
    Discard {
        /** At most [`crate::DeviceInfo::max_discard_segments`]. */
        segments: &'r [Segment],
    },
    /// These sectors read as zeroes afterwards.
    WriteZeroes {
        /** At most [`crate::DeviceInfo::max_write_zeroes_segments`]. */
        segments: &'r [Segment],
    },
    /// The device's serial into `data`: 20 bytes, padded with zeroes.
    GetId {
        /** At least 20 bytes. */
        data: GuestRange,
    },
}

/// [`Work`], and who asks.
#[derive(Clone, Copy, Debug)]
pub struct Request<'r> {
    /// What to do.
    pub work: Work<'r>,
    /// Comes back in the [`Completion`]; the queue does not look at it.
    pub token: u64,
    /// Ends with [`RequestError::DeadlinePassed`] if the device has not answered by then.
    pub deadline: Option<Instant>,
}

impl<'r> Request<'r> {
    /// A request without a deadline.
    #[must_use]
    pub fn new(work: Work<'r>, token: u64) -> Self {
        Self { work, token, deadline: None }
    }
}

/// How a request ended. Each request ends exactly once; one that ended with its buffers still at the device
/// ([`RequestError::is_with_device`]) is followed by exactly one [`RequestError::Returned`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As given.
    pub token: u64,
    /// Bytes of data the device stored: those of a read or of an id.
    pub stored_bytes: u32,
    /// What became of it.
    pub result: Result<(), RequestError>,
}

impl Default for Completion {
    fn default() -> Self {
        Self { token: 0, stored_bytes: 0, result: Ok(()) }
    }
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// `VIRTIO_BLK_S_IOERR`.
    #[error("the device reports an I/O error")]
    IoErr,
    /// `VIRTIO_BLK_S_UNSUPP`.
    #[error("the device does not support the request")]
    Unsupported,
    /// Not one of the status values of virtio 1.3 §5.2.6.
    #[error("the device answered with status {status}, which has no meaning")]
    BadStatus {
        /** As read. */
        status: u8,
    },
    /// Fewer bytes than a successful read must store.
    #[error("the device stored {stored_bytes} bytes, the request has {wanted_bytes}")]
    ShortRead {
        /** As read, without the status byte. */
        stored_bytes: u32,
        /** What was asked for. */
        wanted_bytes: u64,
    },
    /// Not answered in time. The buffers are still with the device.
    #[error("the device did not answer before the deadline")]
    DeadlinePassed,
    /// Cancelled by its owner. The buffers are still with the device.
    #[error("cancelled")]
    Cancelled,
    /// The connection is gone, or the device broke its ring, and the request was not done again.
    #[error("the device is gone, whether the request was done is unknown")]
    Lost,
    /// A request that ended before has left the device now; its buffers are its owner's again.
    #[error("the device let go of the buffers of a request that had ended before")]
    Returned,
}

impl RequestError {
    /// Whether the device may still read or write the request's buffers.
    #[must_use]
    pub fn is_with_device(self) -> bool {
        matches!(self, Self::DeadlinePassed | Self::Cancelled)
    }
}
