//! Memory that the device may use: our own pool, and memory that a user registers.
//!
//! `MemoryMap (all regions, announced to the back-end) → open ranges → Queue::push looks each buffer up`
//!
//! - A request refers to its buffers by guest address. User memory keeps the address of the user's mapping. The
//!   driver's own memory gets guest addresses from `OWN_MEMORY_START` on, above any user's memory.
//! - Rings, headers, status bytes and tables are in regions that are never open to requests.
//!
//! See also: the layout of a queue's private region (`queue/area.rs`), announcing memory to the back-end (`device.rs`).

mod map;
mod options;
mod pool;

#[cfg(test)]
mod map_tests;

pub(crate) use map::{MemoryMap, OpenRanges};
pub use options::{PoolOptions, UserMemory};
pub use pool::{Buffer, Pool};
