//! The state from which another process continues a session: plain values, and a list of descriptors.
//!
//! `Session (frozen) → SessionState + descriptors → sent over a socket → checked like a front-end's messages →
//! Session`
//!
//! - A value refers to a descriptor by its index in the list. Each index is used at most once.
//! - Other state starts afresh: counters of queues and workers, log limits, and which queues an operator attached. The
//!   disk's totals continue (`DiskTotals`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_mem::Quota;
use serde::{Deserialize, Serialize};

/// An index in the list of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Place(u32);

/// The state of one front-end's session.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionState {
    /// The session's connection.
    pub(super) socket: Place,
    /// Feature bits that the driver accepted.
    pub(super) negotiated: Option<u64>,
    pub(super) protocol: u64,
    pub(super) protocol_negotiated: bool,
    /// The received part of an incomplete message.
    pub(super) half: Option<HalfState>,
    /// Whether this session runs the disk's rings.
    pub(super) has_lease: bool,
    /// Whether `VHOST_F_LOG_ALL` was accepted.
    pub(super) log_all: bool,
    pub(super) dirty_log: Option<DirtyLogState>,
    /// The eventfd to signal when bits are set in the log.
    pub(super) dirty_log_changed: Option<Place>,
    /// Whether writes may complete before they are durable.
    pub(super) writeback: bool,
    /// Whether the front-end has sent at least one message.
    pub(super) heard: bool,
    pub(super) regions: Vec<RegionState>,
    pub(super) log: Option<LogState>,
    pub(super) backend_channel: Option<Place>,
    pub(super) vrings: Vec<VringState>,
}

/// A frozen session.
#[derive(Debug)]
pub struct Handed {
    /// The session's values.
    pub state: SessionState,
    /// The descriptors to which the state refers.
    pub fds: Vec<Arc<OwnedFd>>,
    /// When the freeze of its queues began, by the host's monotonic clock.
    pub frozen_ns: u64,
}

/// A region of guest memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RegionState {
    pub(super) fd: Place,
    pub(super) guest_addr: u64,
    pub(super) size_bytes: u64,
    pub(super) user_addr: u64,
    pub(super) file_offset_bytes: u64,
}

/// The bytes and descriptors of a half-received message.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HalfState {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<Place>,
    /// How much time is left for the rest to arrive.
    pub(super) left_ms: u64,
}

/// The log of a live migration, whether already in use or not.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DirtyLogState {
    pub(super) fd: Place,
    pub(super) mmap_bytes: u64,
    pub(super) offset_bytes: u64,
}

/// The memory of the in-flight logs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LogState {
    pub(super) fd: Place,
    pub(super) mmap_bytes: u64,
    pub(super) offset_bytes: u64,
    pub(super) queues: u16,
    pub(super) entries: u16,
}

/// The state set by the front-end's messages about one queue, and the position at which its ring continues.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VringState {
    pub(super) queue_size: Option<u16>,
    /// Addresses of the descriptors, available and used areas in the front-end's address space.
    pub(super) addresses: Option<[u64; 3]>,
    pub(super) log_addr: Option<u64>,
    pub(super) base: u32,
    pub(super) kick: Option<Place>,
    pub(super) call: Option<Place>,
    pub(super) err: Option<Place>,
    pub(super) enabled: bool,
    pub(super) failed: bool,
    /// Whether the session knows the guest's cache mode (`Vring::is_known`).
    pub(super) has_run: bool,
}

/// Outgoing descriptors by index.
#[derive(Debug, Default)]
pub(super) struct Outgoing(pub(super) Vec<Arc<OwnedFd>>);

impl Outgoing {
    pub(super) fn put(&mut self, fd: &Arc<OwnedFd>) -> Place {
        // A process cannot have more descriptors.
        let place = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0.push(Arc::clone(fd));
        Place(place)
    }

    pub(super) fn put_some(&mut self, fd: Option<&Arc<OwnedFd>>) -> Option<Place> {
        fd.map(|fd| self.put(fd))
    }
}

/// There is no descriptor at the index, or it was already taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("descriptor {place} of the {count} that were handed over is missing, or used twice")]
pub(crate) struct NoDescriptor {
    place: u32,
    count: usize,
}

/// Received descriptors. Another thread closes the descriptors that the session does not take, because closing may
/// wait.
#[derive(Debug)]
pub(super) struct Incoming {
    fds: Vec<Option<OwnedFd>>,
    quota: Arc<Quota>,
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.fds.drain(..).flatten().for_each(|fd| self.quota.close(&Arc::new(fd)));
    }
}

impl Incoming {
    pub(super) fn new(fds: Vec<OwnedFd>, quota: &Arc<Quota>) -> Self {
        Self { fds: fds.into_iter().map(Some).collect(), quota: Arc::clone(quota) }
    }

    pub(super) fn take(&mut self, Place(place): Place) -> Result<OwnedFd, NoDescriptor> {
        let count = self.fds.len();
        let at = usize::try_from(place).unwrap_or(usize::MAX);
        self.fds.get_mut(at).and_then(Option::take).ok_or(NoDescriptor { place, count })
    }

    pub(super) fn take_some(&mut self, place: Option<Place>) -> Result<Option<OwnedFd>, NoDescriptor> {
        place.map(|place| self.take(place)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use guest_mem::{Budget, Limits};

    use super::*;

    #[test]
    fn descriptor_is_had_once_and_only_from_its_place() {
        let fds = [(); 2].map(|()| OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let quota = Quota::of(&Budget::new(Limits::of_process()));
        let mut incoming = Incoming::new(fds.into(), &quota);
        assert!(incoming.take(Place(1)).is_ok());
        assert_eq!(incoming.take(Place(1)).unwrap_err(), NoDescriptor { place: 1, count: 2 });
        assert_eq!(incoming.take(Place(2)).unwrap_err(), NoDescriptor { place: 2, count: 2 });
        assert!(
            incoming.take_some(Some(Place(0))).unwrap().is_some()
                && incoming.take_some(None).unwrap().is_none()
        );
    }
}
