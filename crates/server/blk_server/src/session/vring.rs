//! The state set by the front-end's messages about one queue, and whether it suffices to run the queue.
//!
//! Front-ends may send these messages in any order: some enable rings before they send addresses. This code only stores
//! the state; the session calls [`Vring::should_run`] after every message.
//!
//! Spec: vhost-user, "Ring states". The running queue is in `queue/mod.rs`.

use std::sync::Arc;

use guest_mem::{GuestMemory, PassedFd};
use virtqueue::{DeviceQueue, RingFeatures, RingLayout};

use crate::data_path::assignment::QueueHandle;

/// Ring addresses as sent, in the front-end's own address space.
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
    /// The address of the used ring in the dirty log, if the front-end wants stores to the used ring marked.
    pub(crate) log_addr: Option<u64>,
    /// The base from the front-end or from the last stop. Its form depends on the ring's format, which may be
    /// negotiated later, so the queue checks the base when the ring starts.
    pub(crate) base: u32,
    pub(crate) kick: Option<PassedFd>,
    pub(crate) call: Option<PassedFd>,
    pub(crate) err: Option<PassedFd>,
    pub(crate) enabled: bool,
    /// Whether the ring failed to start. The session retries only after the front-end stops or resets it.
    pub(crate) failed: bool,
    /// Whether the session knows the guest's cache mode: it opened the ring, or the guest has chosen since the session
    /// began. In both cases the session cannot have missed a choice.
    pub(crate) is_known: bool,
    /// Whether the frozen queue had a ring fault, or no worker could serve it.
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

    /// Whether `memory` contains each part of the ring completely.
    pub(crate) fn is_whole(&self, memory: &Arc<GuestMemory>, features: RingFeatures) -> bool {
        let layout = self.layout(memory);
        layout.is_some_and(|layout| DeviceQueue::check_place(&layout, memory, features).is_ok())
    }

    /// The parts of the ring in guest memory; `None` if an address is in no region.
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
