//! The right of one session to run a disk's rings, and with it the storage's own lock, if the storage has one.
//!
//! `lease → begin_use: the storage's lock is taken → rings run → end_use: writes are durable, the lock is released`
//!
//! Storage on another machine may not answer, so its calls run on a thread of their own (`storage_thread.rs`). The tables of
//! a writable image are read and closed by its metadata thread.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use disk_image::volume::Volume;
use disk_image::volume::link::Use;
use tracing::warn;

use crate::data_path::disk::Disk;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::disk::storage_answer::{StorageError, wait_begun, wait_ended};
use crate::data_path::disk::storage_thread::StorageThread;

/// How long a session waits for another session to stop its rings. The other session's front-end may have disconnected
/// with I/O in flight, or may be about to migrate away.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a lease waits for its storage. The storage's thread goes on after that.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a session may not start rings.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaseError {
    #[error("session {holder} has started rings of this disk and did not stop them within {} s", timeout.as_secs())]
    Held { holder: u64, timeout: Duration },
    #[error("the session is ending")]
    Ending,
    #[error("the disk's storage: {0}")]
    Storage(String),
}

/// The right of one session to start rings, until this value is dropped.
#[derive(Debug)]
pub(crate) struct RingLease {
    disk: Arc<Disk>,
    /// `None`: the disk is on this host.
    storage: Option<Arc<StorageThread>>,
    uses_storage: bool,
    /// The tables that this lease uses.
    volume: Option<Arc<Volume>>,
}

impl From<StorageError> for LeaseError {
    fn from(error: StorageError) -> Self {
        match error {
            StorageError::Ending => Self::Ending,
            StorageError::Failed(why) => Self::Storage(why),
        }
    }
}

impl RingLease {
    /// Waits until no other session has started rings.
    pub fn take(
        disk: &Arc<Disk>,
        session: &SessionLink,
        storage: Option<Arc<StorageThread>>,
    ) -> Result<Self, LeaseError> {
        Self::take_within(LEASE_TIMEOUT, disk, session, storage)
    }

    pub fn take_within(
        timeout: Duration,
        disk: &Arc<Disk>,
        session: &SessionLink,
        storage: Option<Arc<StorageThread>>,
    ) -> Result<Self, LeaseError> {
        let waited = disk.lease_free.wait_timeout_while(disk.lease(), timeout, |lease| {
            lease.holder.is_some() && session.end_reason().is_none()
        });
        let (mut lease, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if lease.retired || session.end_reason().is_some() {
            return Err(LeaseError::Ending);
        }
        if let Some(holder) = lease.holder {
            return Err(LeaseError::Held { holder, timeout });
        }
        lease.holder = Some(session.id());
        if !lease.users.contains(&session.id()) {
            lease.users.push(session.id());
        }
        Ok(Self { disk: Arc::clone(disk), storage, uses_storage: false, volume: None })
    }

    /// Takes the storage's lock, then lets the metadata thread read the tables, each within `limit` if there is one. To be
    /// called before a ring starts.
    pub fn begin_use(
        &mut self,
        session: &SessionLink,
        front_end: &OwnedFd,
        limit: Option<Duration>,
    ) -> Result<(), LeaseError> {
        if let (Some(storage), false) = (&self.storage, self.uses_storage) {
            storage.begin(session, front_end, limit)?;
        }
        self.uses_storage = true;
        if self.volume.is_some() {
            return Ok(());
        }
        // Another image may have replaced that of the last use.
        let volume = self.disk.image().backing().volume().cloned();
        if let Some((volume, begun)) = volume.and_then(|volume| Some((volume.clone(), volume.begin()?))) {
            let (number, begun) = begun;
            // The metadata thread carries out the order even if the session waits no longer.
            let give_up = || volume.undo_begin(number);
            wait_begun(&begun, session, front_end, limit, give_up)?;
            self.volume = Some(volume);
        }
        Ok(())
    }

    /// Makes all writes durable, lets the metadata thread close the tables, and releases the storage's lock. To be called
    /// when no request is in flight, before another process starts rings.
    pub fn end_use(&mut self, timeout: Duration) -> Result<(), LeaseError> {
        if let (Some(storage), true) = (&self.storage, std::mem::take(&mut self.uses_storage)) {
            storage.end(timeout)?;
        }
        let Some(volume) = self.volume.take() else { return Ok(()) };
        let ended = volume.order(Use::Ends).map_or(Ok(()), |ended| wait_ended(&ended, timeout));
        // The failure must survive a change of server or image.
        if volume.has_sync_failed() {
            self.disk.mark_failed();
        }
        Ok(ended?)
    }
}

impl Drop for RingLease {
    fn drop(&mut self) {
        if let Err(error) = self.end_use(END_TIMEOUT) {
            warn!(
                disk = self.disk.name(),
                "cannot close the storage after the guest's last request: {error}"
            );
        }
        self.disk.lease().holder = None;
        self.disk.lease_free.notify_all();
    }
}
