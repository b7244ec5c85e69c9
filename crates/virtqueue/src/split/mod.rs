//! The split virtqueue: descriptor table, available ring, used ring (virtio 1.3 §2.7).
//!
//! - [`DeviceQueue`]: what serves requests. [`DriverQueue`]: what makes them.
//! - [`RawRing`]: a driver that keeps no rule, for tests and fuzzing.
//!
//! Not here: notification arithmetic (`notify.rs`), the buffers of a chain (`chain.rs`).

mod device;
mod driver;
mod layout;
mod raw;
mod tables;
mod used_ring;

pub use device::DeviceQueue;
pub use driver::{AddError, DriverFault, DriverQueue, Used};
pub use layout::RingLayout;
pub use raw::{RawDescriptor, RawRing};
