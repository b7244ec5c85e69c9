//! Reasons to refuse a well-formed request: the image's limits, or the state of the disk.

use guest_mem::{AccessError, FillError};

use crate::data_path::queue::in_flight::RequestKind;

/// Why a well-formed request is refused. The request fails with IOERR, and the server logs a line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(transparent)]
    Range(#[from] disk_image::RangeError),
    #[error("{kind} on a read-only disk")]
    ReadOnly { kind: RequestKind },
    #[error("{kind} of {sectors} sectors in one segment; at most {max} are allowed")]
    SegmentTooLong { kind: RequestKind, sectors: u32, max: u32 },
    #[error(transparent)]
    Buffers(#[from] FillError),
    #[error(transparent)]
    Store(#[from] AccessError),
    #[error("{kind} after a failed sync: the disk accepts only reads until the server is restarted")]
    DiskFailed { kind: RequestKind },
    #[error("request of {bytes} bytes; a disk with limits of IOPS or bandwidth allows at most {max}")]
    TooLong { bytes: u64, max: u64 },
    #[error("the queue stops before the disk's limits let it through; it was in flight before this server")]
    BeyondLimits,
    #[error("{kind} was parked, and its data is no longer in the memory that the front-end shares")]
    LostBuffers { kind: RequestKind },
}
