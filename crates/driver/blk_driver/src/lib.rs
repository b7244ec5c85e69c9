//! A virtio-blk driver in user space: connects to any vhost-user-blk socket and uses its queues.
//!
//! `Device::connect → Queue (push → prepare_kick → Kick::notify … completions) → Device::next_event`
//!
//! - The driver does not trust the device: it checks everything that the device writes against its own private memory,
//!   and reports every violation as an error.
//! - No call waits longer than its limit; once a queue is warm, a request allocates nothing.
//! - A notification is a separate value ([`Kick`]): it needs no lock and may outlive its queue.
//!
//! ```no_run
//! use std::time::Duration;
//! use blk_driver::{Completion, Device, GuestRange, Options, Request, Work};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (device, mut queues) = Device::connect(&Options::new("/run/vm1.sock"))?;
//! let buffer = device.pool().take(8 * 4096)?;
//! for block in 0..8 {
//!     let part = GuestRange { addr: buffer.range().addr + block * 4096, len_bytes: 4096 };
//!     queues[0].push(&Request::new(Work::Read { sector: block * 8, data: &[part] }, block))?;
//! }
//! queues[0].submit(); // prepare_kick, then notify; you may release your own lock in between
//! let mut done = [Completion::default(); 8];
//! let count = queues[0].wait(&mut done, Duration::from_secs(10))?; // 0 if none has ended in time
//! # Ok(()) }
//! ```
//!
//! Spec: virtio 1.3 §5.2; vhost-user. See also: rings (`virtqueue`), the meaning of a request (`virtio_blk`).
#![forbid(unsafe_code)]

use std::sync::Arc; // `kick.rs` imports it from its parent module, so that the model can substitute loom's

mod error;

mod request;

mod kick;
#[cfg(all(test, loom))]
mod kick_model;

mod memory;

mod queue;

mod shared;

mod device;

mod alone;

#[cfg(test)]
mod schedule_tests;

// The unit tests share the rig of the integration tests, and the rig refers to the crate by its name.
#[cfg(test)]
extern crate self as blk_driver;

#[cfg(test)]
#[path = "../tests/it/rig/mod.rs"]
mod rig;

pub use alone::{DeviceEnd, alone};
pub use device::{Device, DeviceInfo, Event, Options, Reconnect, ReconnectReport};
pub use guest_mem::GuestRange;
pub use virtio_blk::Segment;

pub use error::{
    BlockingError, ConnectError, MakeQueueError, MemoryError, MessageError, PushError, QueueError,
};
pub use kick::{Doorbell, EventFd, Kick};
pub use memory::{Buffer, Pool, PoolOptions, UserMemory};
pub use queue::{Queue, QueueStats, ShortReads};
pub use request::{Completion, Durability, Request, RequestError, Work};
pub use shared::{KickPolicy, SharedQueue};
