//! A live migration's messages: the front-end passes its dirty log; the server marks each stored page in it.
//!
//! `SET_LOG_BASE (file) + LOG_ALL or a ring's F_LOG → StoreLog → the session's memory → its queues' workers`
//!
//! - The log is part of the memory that a queue uses, and changes like a memory table: the worker carries out a command
//!   before the session answers the front-end. Queues keep running. A request marks the log that is active when it
//!   completes.
//! - The server marks every store as soon as the front-end requests any. Superfluous marks only cause extra copies.
//! - A log that is too small ends the session: front-ends ignore the answer, and a migration that misses pages gives
//!   the guest wrong memory.
//!
//! Spec: vhost-user, "Migration", SET_LOG_BASE, SET_LOG_FD, SET_VRING_ADDR. The bits are in `guest_mem`.

use std::sync::Arc;

use guest_mem::{DirtyLog, MapError, MemoryError, PassedFd};

use super::state::{DirtyLogState, Outgoing, Place};

/// `VHOST_F_LOG_ALL` (vhost-user, "Migration").
pub(super) const F_LOG_ALL: u64 = 1 << 26;

/// Why stores cannot be marked in the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirtyLogRefused {
    #[error("SET_LOG_BASE without LOG_SHMFD (bit 1): negotiate it, because only shared memory is supported")]
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
    /// The data that another server needs to mark the same log. The front-end's other messages determine whether to
    /// mark it.
    pub(super) fn state(&self, fds: &mut Outgoing) -> (Option<DirtyLogState>, Option<Place>) {
        let log = self.bits.as_ref().map(|bits| bits.region()).map(|region| DirtyLogState {
            fd: fds.put(region.fd()),
            mmap_bytes: region.spec().size_bytes,
            offset_bytes: region.spec().file_offset_bytes,
        });
        (log, fds.put_some(self.changed.as_ref().map(PassedFd::shared)))
    }
}
