//! The packed virtqueue: one ring of descriptors that both sides write (virtio 1.3 §2.8).
//!
//! - [`DeviceQueue`]: what serves requests. [`DriverQueue`]: what makes them.
//!
//! Not here: the buffers of a chain (`chain.rs`), indirect tables (`tables.rs`).

mod device;
mod driver;

pub use device::DeviceQueue;
pub use driver::DriverQueue;

/// The ring base of a new packed ring: both positions at slot 0, both wrap counters 1 (virtio 1.3 §2.8.1).
pub const FRESH_BASE: u32 = 0x8000_8000;
