//! Virtqueues from both ends: the rings in guest memory that connect a driver and a device.
//!
//! `driver: add → publish ⇒ device: pop → Chain → (owner works) → push_used → publish ⇒ driver: pop_used`
//!
//! - Two formats, split and packed, behind the same calls: [`DeviceQueue`] and [`DriverQueue`].
//! - The peer is hostile and may write at any moment. Each index, address and length is read once and checked
//!   before use. Each side keeps its own state in private memory and never reads it back from the ring.
//! - A fault inside a chain fails that request; a fault of the ring stops the queue.
//! - A device can log its in-flight requests, so that its successor can redo them after a crash (`log.rs`).
//! - Nothing is allocated between `new` and `drop`.
//!
//! Spec: virtio 1.3 §2.7 (split), §2.8 (packed).
//! See also: I/O, threads and file descriptors (`blk_server`); the meaning of a chain (`virtio_blk`).
#![forbid(unsafe_code)]

mod buffers;
mod chain;
mod device;
mod driver;
mod driver_fault;
mod fault;
mod layout;
mod log;
#[cfg(test)]
mod log_crash_tests;
#[cfg(test)]
mod log_race_tests;
#[cfg(test)]
mod log_tests;
pub mod notify;
pub mod packed;
pub mod split;
mod step;
mod tables;

pub use chain::{Chain, Used};
pub use device::DeviceQueue;
pub use driver::DriverQueue;
pub use driver_fault::{AddError, DriverFault};
pub use fault::{ChainFault, IndirectFault, PopError, RingFault, RingPart};
pub use layout::RingLayout;
pub use log::{LogArea, LogFault, Recovery};

/// Smallest supported queue: virtio-blk needs a descriptor for the header and one for the status.
pub const MIN_QUEUE_SIZE: u16 = 2;

/// Largest supported queue: the largest that QEMU offers. `IOV_MAX` also limits the buffers of one request.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Negotiated feature bits that change how a ring is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// `VIRTIO_F_EVENT_IDX`: a side requests notifications by index instead of by flag (virtio 1.3 §2.7.7, §2.7.10).
    pub event_idx: bool,
    /// `VIRTIO_F_INDIRECT_DESC`: descriptor tables outside the ring (virtio 1.3 §2.7.5.3).
    pub indirect: bool,
    /// `VIRTIO_F_RING_PACKED`: one ring of descriptors instead of three parts (virtio 1.3 §2.8).
    pub packed: bool,
}

/// The example in README.md compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[derive(Debug)]
pub struct Readme;
