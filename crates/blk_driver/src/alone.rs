//! A queue without a session: for tests, benchmarks and experiments that bring the device half along.
//!
//! Not here: connecting (`device.rs`).

use std::io;
use std::sync::Arc;

use guest_mem::GuestMemory;
use virtqueue::{RingFeatures, RingLayout};

use crate::kick::{Doorbell, EventFd};
use crate::memory::{Pool, PoolOptions};
use crate::queue::Queue;

/// What the device half needs.
#[derive(Debug)]
pub struct DeviceEnd {
    /// All of it.
    pub memory: Arc<GuestMemory>,
    /// Where the ring lies.
    pub layout: RingLayout,
    /// As given.
    pub features: RingFeatures,
    /// Signal it when the driver wants to hear of completions.
    pub call: Arc<EventFd>,
}

/// A queue of `queue_size` with the pool and doorbell given, and what its device needs.
///
/// # Errors
/// No memory or descriptors.
pub fn alone(
    _queue_size: u16,
    _features: RingFeatures,
    _pool: PoolOptions,
    _bell: Arc<dyn Doorbell>,
) -> io::Result<(Queue, Pool, DeviceEnd)> {
    todo!()
}
