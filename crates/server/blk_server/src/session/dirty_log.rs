//! The dirty log of one session: maps the file that the front-end passed, and stores the front-end's settings for the
//! log.
//!
//! - During a live migration the server sets one bit in this log for each guest page that it stores to.
//! - [`DirtyLogging::state`] returns the data with which another server continues the same log after a live upgrade.
//!
//! `log_messages.rs` handles the messages about the log. `guest_mem` sets the bits.

use std::sync::Arc;

use guest_mem::{DirtyLog, MapError, MemoryError, PassedFd};

use super::state::{DirtyLogState, Outgoing, Place};

/// `VHOST_F_LOG_ALL` (vhost-user, "Migration").
pub(super) const F_LOG_ALL: u64 = 1 << 26;

/// Why stores cannot be marked in the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirtyLogRefused {
    #[error(
        "SET_LOG_BASE without LOG_SHMFD (bit 1): the front-end must negotiate it, because the log must be shared memory"
    )]
    NotShared,
    #[error("cannot map the dirty log: {mmap_bytes} bytes from byte {offset_bytes} of its file")]
    Map { mmap_bytes: u64, offset_bytes: u64, source: MapError },
    #[error(transparent)]
    TooSmall(#[from] MemoryError),
}

/// The state set by the front-end's messages about the log.
#[derive(Debug, Default)]
pub(super) struct DirtyLogging {
    pub(super) bits: Option<Arc<DirtyLog>>,
    /// The descriptor to signal when bits are set.
    pub(super) changed: Option<PassedFd>,
    /// Whether `VHOST_F_LOG_ALL` is on.
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
    /// The data that another server needs to continue the same log. The front-end's other messages determine whether
    /// the server marks stores in it.
    pub(super) fn state(&self, fds: &mut Outgoing) -> (Option<DirtyLogState>, Option<Place>) {
        let log = self.bits.as_ref().map(|bits| bits.region()).map(|region| DirtyLogState {
            fd: fds.put(region.fd()),
            mmap_bytes: region.spec().size_bytes,
            offset_bytes: region.spec().file_offset_bytes,
        });
        (log, fds.put_some(self.changed.as_ref().map(PassedFd::shared)))
    }
}
