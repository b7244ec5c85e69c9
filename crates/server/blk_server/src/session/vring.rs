//! The front-end's messages about one queue so far, and whether they suffice to run it.
//!
//! A front-end may send them in any order (some enable rings before they send addresses). So nothing here acts:
//! the session calls [`Vring::should_run`] after every message.
//!
//! Spec: vhost-user, "Ring states". Not here: the running queue (`queue/mod.rs`).

use std::sync::Arc;

use guest_mem::{GuestMemory, PassedFd};
use virtqueue::{DeviceQueue, RingFeatures, RingLayout};

use crate::data_path::assignment::QueueHandle;

/// Ring addresses as sent: in the front-end's own address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UserAddresses {
    pub(crate) descriptors: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
}

/// One queue of a session.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    pub(crate) queue_size: Option<u16>,
    pub(crate) addresses: Option<UserAddresses>,
    /// Where the used ring's stores are noted in the dirty log, if the front-end wants that.
    pub(crate) log_addr: Option<u64>,
    /// As sent, or as left by the last stop. What it has to look like depends on the ring's format, which may
    /// be negotiated later: checked when the ring starts.
    pub(crate) base: u32,
    pub(crate) kick: Option<PassedFd>,
    pub(crate) call: Option<PassedFd>,
    pub(crate) err: Option<PassedFd>,
    pub(crate) enabled: bool,
    /// The ring failed to start. The session does not retry until the front-end stops or resets it.
    pub(crate) failed: bool,
    /// Of the guest's cache mode: its ring was opened in this session, or the guest has chosen since it began. A ring found
    /// in use hides no choice made elsewhere.
    pub(crate) is_known: bool,
    /// Of a queue that is frozen: its ring had a fault, or no worker could serve it.
    pub(crate) broken: bool,
    pub(crate) running: Option<QueueHandle>,
}

impl Vring {
    /// Whether the queue is configured, started and enabled.
    pub(crate) fn should_run(&self) -> bool {
        self.queue_size.is_some()
            && self.addresses.is_some()
            && self.kick.is_some()
            && self.enabled
            && !self.failed
    }

    /// Whether `memory` holds all of the rings, not only their first bytes.
    pub(crate) fn is_whole(&self, memory: &Arc<GuestMemory>, features: RingFeatures) -> bool {
        let layout = self.layout(memory);
        layout.is_some_and(|layout| DeviceQueue::check_place(&layout, memory, features).is_ok())
    }

    /// Where the rings lie in guest memory; `None` if an address is in no region.
    pub(crate) fn layout(&self, memory: &GuestMemory) -> Option<RingLayout> {
        let (queue_size, addresses) = (self.queue_size?, self.addresses?);
        Some(RingLayout {
            queue_size,
            descriptors: memory.user_to_guest(addresses.descriptors)?,
            avail: memory.user_to_guest(addresses.avail)?,
            used: memory.user_to_guest(addresses.used)?,
        })
    }
}
