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
    #[error("{kind} has {sectors} sectors in one segment, but at most {max} are allowed")]
    SegmentTooLong { kind: RequestKind, sectors: u32, max: u32 },
    #[error(transparent)]
    Buffers(#[from] FillError),
    #[error(transparent)]
    Store(#[from] AccessError),
    #[error("{kind} after a failed sync: the disk accepts only reads until the server is restarted")]
    DiskFailed { kind: RequestKind },
    #[error("it has {bytes} bytes, but a disk with limits of IOPS or bandwidth allows at most {max}")]
    TooLong { bytes: u64, max: u64 },
    #[error("the previous server had it in flight, and its queue stops before the disk's limits admit it")]
    BeyondLimits,
    #[error("{kind} was parked, and its data is no longer in the memory that the front-end shares")]
    LostBuffers { kind: RequestKind },
}
