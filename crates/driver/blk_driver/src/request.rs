//! Requests to the device, and their completions.
//!
//! Spec: virtio 1.3 §5.2.6.

use std::time::Instant;

use guest_mem::GuestRange;
use virtio_blk::Segment;

/// When a write completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The write completes when the device has the data. A later flush makes the data durable.
    #[default]
    Cached,
    /// The write completes when the data is durable: a flush follows the write, and the request completes with that
    /// flush.
    Durable,
}

/// One operation. Buffers are ranges of registered memory ([`crate::Pool`], [`crate::UserMemory`]).
#[derive(Clone, Copy, Debug)]
pub enum Work<'r> {
    /// Reads from `sector` (of 512 bytes) on into `data`, buffer after buffer; the total must be a multiple
    /// of 512 bytes.
    Read {
        /** First sector. */
        sector: u64,
        /** Destination buffers. */
        data: &'r [GuestRange],
    },
    /// Writes `data` from `sector` on.
    Write {
        /** First sector. */
        sector: u64,
        /** Source buffers. */
        data: &'r [GuestRange],
        /** When the device may report the write as complete. */
        durability: Durability,
    },
    /// Makes all previously completed writes durable.
    Flush,
    /// Declares the contents of these sectors as no longer needed.
    Discard {
        /** The segments; at most [`crate::DeviceInfo::max_discard_segments`]. */
        segments: &'r [Segment],
    },
    /// Makes these sectors read as zeroes.
    WriteZeroes {
        /** The segments; at most [`crate::DeviceInfo::max_write_zeroes_segments`]. */
        segments: &'r [Segment],
    },
    /// Stores the device's serial in `data`: 20 bytes, padded with zeroes.
    GetId {
        /** Destination buffer of at least 20 bytes. */
        data: GuestRange,
    },
}

/// A [`Work`] with its token and deadline.
#[derive(Clone, Copy, Debug)]
pub struct Request<'r> {
    /// The operation.
    pub work: Work<'r>,
    /// Returned in the [`Completion`]; the queue does not interpret it.
    pub token: u64,
    /// If the device has not answered by then, the request ends with [`RequestError::DeadlinePassed`].
    pub deadline: Option<Instant>,
}

impl<'r> Request<'r> {
    /// A request without a deadline.
    #[must_use]
    pub fn new(work: Work<'r>, token: u64) -> Self {
        Self { work, token, deadline: None }
    }
}

/// The end of a request. Each request ends exactly once. A request that ended while its buffers were still with the
/// device ([`RequestError::is_with_device`]) is followed by exactly one [`RequestError::Returned`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// For a read or GET_ID: number of data bytes that the device stored.
    pub stored_bytes: u32,
    /// The request's result.
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
    /// The status byte is not one of the values of virtio 1.3 §5.2.6.
    #[error("the device answered with status {status}, which virtio-blk does not define")]
    BadStatus {
        /** The status byte. */
        status: u8,
    },
    /// The device stored fewer bytes than a successful read must store.
    #[error("the device stored only {stored_bytes} of the {wanted_bytes} bytes that the read requested")]
    ShortRead {
        /** Number of bytes stored, without the status byte. */
        stored_bytes: u32,
        /** The required length. */
        wanted_bytes: u64,
    },
    /// The device did not answer in time. It still has the buffers.
    #[error("the device did not answer before the deadline")]
    DeadlinePassed,
    /// The owner cancelled the request. The device still has the buffers.
    #[error("the request was cancelled")]
    Cancelled,
    /// The connection was lost, or the device broke its ring, and the request was not sent again.
    #[error("the device is no longer available; it is unknown whether it carried out the request")]
    Lost,
    /// The device has released the buffers of a request that had already ended; the owner may use them again.
    #[error("the device released the buffers of a request that had already ended")]
    Returned,
}

impl RequestError {
    /// Whether the device may still read or write the request's buffers.
    #[must_use]
    pub fn is_with_device(self) -> bool {
        matches!(self, Self::DeadlinePassed | Self::Cancelled)
    }
}
