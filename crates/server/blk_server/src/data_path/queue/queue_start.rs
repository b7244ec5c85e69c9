//! The data that a worker needs to start a queue, and the reasons for a queue to stop.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use disk_image::{HostOpener, Opener};
use guest_mem::{Budget, GuestMemory, Limits};
use virtqueue::{LogArea, RingFeatures, RingLayout, packed};

use crate::data_path::counters::QueueMeter;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::disk::{Disk, DiskConfig};
use crate::host::signal::adopt;

/// Everything a worker needs to run a queue.
pub(crate) struct QueueStart {
    pub(crate) disk: Arc<Disk>,
    pub(crate) session: Arc<SessionLink>,
    pub(crate) index: u16,
    pub(crate) memory: Arc<GuestMemory>,
    /// `None` if a ring address lies in no memory region.
    pub(crate) layout: Option<RingLayout>,
    pub(crate) ring: RingFeatures,
    /// The base of SET_VRING_BASE: 16 bits of a split ring's index, or two positions of a packed ring.
    pub(crate) base: u32,
    /// If the ring is already in use, whether its guest may have disabled the cache unseen by this process.
    pub(crate) cache_choice_unknown: bool,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) call: Option<Arc<OwnedFd>>,
    pub(crate) err: Option<Arc<OwnedFd>>,
    pub(crate) meter: Arc<QueueMeter>,
    /// The in-flight log.
    pub(crate) log: Option<LogArea>,
    /// Whether requests that only the previous server had started stay in the log on a stop (GET_VRING_BASE_INFLIGHT).
    pub(crate) leaves_unbegun: bool,
}

impl QueueStart {
    /// Queue 0 of a disk that has no front-end. Its write cache starts in the image's cache mode.
    pub(crate) fn alone(
        disk: DiskConfig,
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        ring: RingFeatures,
        kick: OwnedFd,
        call: OwnedFd,
    ) -> io::Result<Self> {
        let opener: Arc<dyn Opener> = Arc::new(HostOpener);
        let budget = Budget::new(Limits::of_process());
        let disk = Arc::new(Disk::new(disk, &opener, &budget).map_err(io::Error::other)?);
        let session = SessionLink::new(0)?;
        session.set_write_cache(disk.guest_cache().mode_at_first());
        Ok(Self {
            meter: disk.totals().start_queue(),
            disk,
            session,
            index: 0,
            memory,
            layout: Some(layout),
            ring,
            base: if ring.packed { packed::FRESH_BASE } else { 0 },
            cache_choice_unknown: false,
            kick: adopt(kick)?,
            call: Some(adopt(call)?),
            err: None,
            log: None,
            leaves_unbegun: false,
        })
    }
}

/// Why a queue stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The front-end stops the ring and waits for its position.
    Ring,
    /// The session ends. The front-end does not learn the position.
    Session,
}
