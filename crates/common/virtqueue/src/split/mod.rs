//! The split virtqueue: descriptor table, available ring, used ring (virtio 1.3 §2.7).
//!
//! - [`DeviceQueue`] serves requests. [`DriverQueue`] makes them.
//! - [`RawRing`]: a driver that follows no rules, for tests and fuzzing.
//!
//! See also: notification arithmetic (`notify.rs`), the buffers of a chain (`chain.rs`).

mod device;
mod driver;
mod layout;
mod log;
mod raw;
mod used_ring;

pub use device::DeviceQueue;
pub use driver::DriverQueue;
pub use raw::{RawDescriptor, RawRing};

pub use crate::chain::Used;
pub use crate::driver_fault::{AddError, DriverFault};
