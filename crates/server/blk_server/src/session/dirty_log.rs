//! A live migration's dirty log, as far as the front-end's messages have described it.
//!
//! Not here: the messages (`log_messages.rs`), the bits (`guest_mem`).

use std::sync::Arc;

use guest_mem::{DirtyLog, DirtyLogError, MemoryError, PassedFd};

use super::state::{DirtyLogState, Outgoing, Place};

/// `VHOST_F_LOG_ALL` (vhost-user, "Migration").
pub(super) const F_LOG_ALL: u64 = 1 << 26;

/// Why stores cannot be marked in the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirtyLogRefused {
    #[error("SET_LOG_BASE without LOG_SHMFD (bit 1): negotiate it, because only shared memory is supported")]
    NotShared,
    #[error("cannot map the dirty log: {mmap_bytes} bytes from byte {offset_bytes} of its file")]
    Map { mmap_bytes: u64, offset_bytes: u64, source: DirtyLogError },
    #[error(transparent)]
    TooSmall(#[from] MemoryError),
}

/// The front-end's messages about the log so far.
#[derive(Debug, Default)]
pub(super) struct DirtyLogging {
    pub(super) bits: Option<Arc<DirtyLog>>,
    /// The descriptor to signal for new bits.
    pub(super) changed: Option<PassedFd>,
    /// `VHOST_F_LOG_ALL` is on.
    pub(super) all: bool,
}

/// Maps the front-end's log.
pub(super) fn mapped(
    fd: PassedFd,
    mmap_bytes: u64,
    offset_bytes: u64,
) -> Result<Arc<DirtyLog>, DirtyLogRefused> {
    let bits = DirtyLog::map_passed(fd, mmap_bytes, offset_bytes);
    Ok(Arc::new(bits.map_err(|source| DirtyLogRefused::Map { mmap_bytes, offset_bytes, source })?))
}

impl DirtyLogging {
    /// What another server needs to mark pages in the same log. Whether the front-end wants that is in its other
    /// messages.
    pub(super) fn state(&self, fds: &mut Outgoing) -> (Option<DirtyLogState>, Option<Place>) {
        let log = self.bits.as_ref().and_then(|bits| bits.region()).map(|region| DirtyLogState {
            fd: fds.put(region.fd()),
            mmap_bytes: region.spec().size_bytes,
            offset_bytes: region.spec().file_offset_bytes,
        });
        (log, fds.put_some(self.changed.as_ref().map(PassedFd::shared)))
    }
}
