//! Driver half of a packed virtqueue. Not here: the device half (`device.rs`).

use std::convert::Infallible;

use guest_mem::{GuestAddress, GuestRange, MemoryView};

use crate::{AddError, DriverFault, RingFault, RingFeatures, RingLayout, Used};

/// One packed queue as a driver sees it: not made yet.
#[derive(Debug)]
pub struct DriverQueue {
    never: Infallible,
}

#[allow(missing_docs, clippy::missing_errors_doc, unused_variables)]
impl DriverQueue {
    pub fn new(view: &MemoryView, layout: RingLayout, features: RingFeatures) -> Result<Self, RingFault> {
        Err(RingFault::BadBase { base: super::FRESH_BASE, queue_size: layout.queue_size })
    }

    #[must_use]
    pub fn free_descriptors(&self) -> u16 {
        match self.never {}
    }

    #[must_use]
    pub fn in_flight(&self) -> u16 {
        match self.never {}
    }

    pub fn add(
        &mut self,
        readable: &[GuestRange],
        writable: &[GuestRange],
        token: u64,
    ) -> Result<u16, AddError> {
        match self.never {}
    }

    pub fn add_indirect(
        &mut self,
        readable: &[GuestRange],
        writable: &[GuestRange],
        table: GuestAddress,
        token: u64,
    ) -> Result<u16, AddError> {
        match self.never {}
    }

    pub fn publish(&mut self) -> bool {
        match self.never {}
    }

    pub fn kick_needed(&mut self) -> bool {
        match self.never {}
    }

    pub fn pop_used(&mut self) -> Result<Option<Used>, DriverFault> {
        match self.never {}
    }

    pub fn disable_interrupts(&mut self) {
        match self.never {}
    }

    pub fn arm_interrupts(&mut self) -> Result<bool, DriverFault> {
        match self.never {}
    }
}
