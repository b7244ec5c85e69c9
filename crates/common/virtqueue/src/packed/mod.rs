//! The packed virtqueue: one ring of descriptors that both sides write (virtio 1.3 §2.8).
//!
//! - [`DeviceQueue`] serves requests. [`DriverQueue`] makes them.
//! - [`RawPacked`]: a driver or device that follows no rules, for tests and fuzzing.
//! - A position is one free-running counter; slot and wrap counter are two views of it (`cursor.rs`).
//! - Length, id and flags of a descriptor are accessed as one 64-bit word: one load reads them together, and one
//!   release store makes a whole batch visible.
//!
//! See also: the buffers of a chain (`chain.rs`), indirect tables (`tables.rs`).

mod cursor;
mod device;
mod driver;
mod event;
mod log;
mod raw;
mod recovery;
mod resume;
mod ring;

pub use device::DeviceQueue;
pub use driver::DriverQueue;
pub use raw::{RawDescriptor, RawPacked};
pub use resume::FRESH_BASE;
