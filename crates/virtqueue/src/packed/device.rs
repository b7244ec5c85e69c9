//! Device half of a packed virtqueue. Not here: the driver half (`driver.rs`).

use std::convert::Infallible;

use guest_mem::MemoryView;

use crate::{Chain, PopError, RingFault, RingFeatures, RingLayout};

/// One packed queue as a device sees it: not served yet.
#[derive(Debug)]
pub struct DeviceQueue {
    never: Infallible,
}

#[allow(missing_docs, clippy::missing_errors_doc, unused_variables)]
impl DeviceQueue {
    pub fn new(
        view: &MemoryView,
        layout: RingLayout,
        features: RingFeatures,
        base: u32,
    ) -> Result<Self, RingFault> {
        Err(RingFault::BadBase { base, queue_size: layout.queue_size })
    }

    #[must_use]
    pub fn with_indirect_limit(self, limit: u16) -> Self {
        match self.never {}
    }

    pub fn rebind(&mut self, view: &MemoryView) -> Result<(), RingFault> {
        match self.never {}
    }

    #[must_use]
    pub fn queue_size(&self) -> u16 {
        match self.never {}
    }

    #[must_use]
    pub fn layout(&self) -> &RingLayout {
        match self.never {}
    }

    #[must_use]
    pub fn position(&self) -> u32 {
        match self.never {}
    }

    pub fn available(&self) -> Result<u16, RingFault> {
        match self.never {}
    }

    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        match self.never {}
    }

    pub fn unpop(&mut self) {
        match self.never {}
    }

    pub fn push_used(&mut self, tag: u16, written_bytes: u32) {
        match self.never {}
    }

    pub fn publish(&mut self) -> bool {
        match self.never {}
    }

    pub fn needs_notification(&mut self) -> bool {
        match self.never {}
    }

    pub fn disable_kicks(&mut self) {
        match self.never {}
    }

    pub fn enable_kicks(&mut self) -> Result<bool, RingFault> {
        match self.never {}
    }
}
