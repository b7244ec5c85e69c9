//! The real device side, whose ring and log a second thread overwrites, so that no model can predict what it reads.
//!
//! Even then, each tag belongs to the ring, a chain has at most the allowed number of buffers with a matching number of
//! bytes, and there are never more requests to redo than the ring has descriptors.

use std::ops::Range;
use std::sync::Arc;

use guest_mem::MemoryView;
use virtqueue::{Chain, DeviceQueue, LogArea, PopError, RingFeatures};

use super::machine::{LOG_BYTES, LOG_ENTRIES, Machine, TABLES, layout};
use super::model::{AVAIL_RING, DESCRIPTORS, USED_RING};
use crate::scribbler::Scribbled;

/// A device side in memory that another thread overwrites.
pub(super) struct Raced {
    memory: MemoryView,
    log: MemoryView,
    features: RingFeatures,
    size: u16,
    limit: u16,
    chain: Chain,
    running: Option<DeviceQueue>,
    position: u32,
    in_flight: Vec<u16>,
    /// Whether the last pop can be undone.
    popped_last: bool,
    /// Whether the ring is broken. The test, like a queue's owner, then takes nothing more from it.
    stopped: bool,
}

impl Raced {
    /// A device in the machine's memory, started on a new ring.
    pub fn new(driver: &Machine, with_log: bool) -> Self {
        let packed = driver.features.packed;
        let mut raced = Self {
            memory: driver.guest.view.clone(),
            log: MemoryView::new(Arc::clone(&driver.log)),
            features: driver.features,
            size: driver.size(),
            limit: driver.limit,
            chain: Chain::with_capacity(driver.limit),
            running: None,
            position: if packed { virtqueue::packed::FRESH_BASE } else { 0 },
            in_flight: Vec::new(),
            popped_last: false,
            stopped: false,
        };
        raced.restart(with_log, raced.position);
        raced
    }

    /// The memory that the second thread overwrites, and the ranges in it.
    pub fn scribbled(&self, of_the_log: bool) -> (Scribbled, Vec<Range<u64>>) {
        if of_the_log {
            return (Scribbled::Mapped(self.log.clone()), std::iter::once(0..LOG_BYTES / 2).collect());
        }
        let size = u64::from(self.size);
        let parts = [(DESCRIPTORS, 16 * size), (AVAIL_RING, 6 + 2 * size), (USED_RING, 6 + 8 * size)];
        let tables = TABLES.map(|at| (at, 0x40));
        let spans = parts.into_iter().chain(tables).map(|(at, len)| at..at + len).collect();
        (Scribbled::Mapped(self.memory.clone()), spans)
    }

    /// Replaces the device by a new one: on a new ring, at the last position, or at any position.
    pub fn start(&mut self, with_log: bool, base: u8, driver: &Machine) {
        let base = match base % 4 {
            0 => virtqueue::packed::FRESH_BASE,
            1 | 2 => self.running.as_ref().map_or(self.position, DeviceQueue::position),
            _ => driver.position() ^ u32::from(base) << 7,
        };
        self.restart(with_log, base);
    }

    fn restart(&mut self, with_log: bool, base: u32) {
        self.position = self.running.take().map_or(self.position, |device| device.position());
        (self.popped_last, self.stopped) = (false, false);
        self.in_flight.clear();
        let at = layout(self.size);
        let area = LogArea::new(Arc::clone(self.log.memory()), 0, LOG_ENTRIES);
        let started = if with_log {
            DeviceQueue::with_log(&self.memory, at, self.features, base, &area)
        } else {
            DeviceQueue::new(&self.memory, at, self.features, base)
        };
        let Ok(device) = started else { return };
        let device = device.with_indirect_limit(self.limit);
        assert!(device.to_redo() <= self.size, "more requests to redo than the ring has descriptors");
        self.running = Some(device);
    }

    pub fn pop(&mut self) {
        let Some(device) = self.running.as_mut().filter(|_| !self.stopped) else { return };
        self.popped_last = false;
        match device.pop(&mut self.chain) {
            Ok(None) => {}
            Ok(Some(tag)) => {
                self.check_chain();
                self.popped_last = self.take(tag);
            }
            Err(PopError::Chain { tag, .. }) => _ = self.take(tag),
            Err(PopError::Ring(_)) => self.stopped = true,
        }
    }

    /// Records the tag as in flight. A tag that is already in flight stops the queue.
    fn take(&mut self, tag: u16) -> bool {
        assert!(tag < self.size, "tag {tag} of a ring of {}", self.size);
        self.stopped |= self.in_flight.contains(&tag);
        if !self.stopped {
            self.in_flight.push(tag);
        }
        !self.stopped
    }

    fn check_chain(&self) {
        let (readable, writable) = (self.chain.readable(), self.chain.writable());
        // The first descriptors may be direct; the last of them refers to a table.
        let most = usize::from(self.limit) + usize::from(self.size);
        assert!(readable.len() + writable.len() <= most, "more buffers than {most}");
        let sum =
            |ranges: &[guest_mem::GuestRange]| ranges.iter().map(|r| u64::from(r.len_bytes)).sum::<u64>();
        assert_eq!(sum(readable), self.chain.readable_bytes());
        assert_eq!(sum(writable), self.chain.writable_bytes());
    }

    pub fn unpop(&mut self) {
        if let Some(device) = self.running.as_mut().filter(|_| std::mem::take(&mut self.popped_last)) {
            self.in_flight.pop();
            device.unpop();
        }
    }

    pub fn push(&mut self, which: usize, written_bytes: u32) {
        self.popped_last = false;
        if let Some(device) = self.running.as_mut().filter(|_| !self.in_flight.is_empty()) {
            let tag = self.in_flight.remove(which % self.in_flight.len());
            device.push_used(tag, written_bytes);
        }
    }

    pub fn publish(&mut self) {
        self.popped_last = false;
        self.running.iter_mut().for_each(|device| _ = device.publish());
    }

    /// Makes the device decide about kicks and calls.
    pub fn ask(&mut self, what: u8) {
        self.popped_last = false;
        let Some(device) = &mut self.running else { return };
        match what % 4 {
            0 => drop(device.available()),
            1 => drop(device.enable_kicks()),
            2 => device.disable_kicks(),
            _ => _ = device.needs_notification(),
        }
    }
}
