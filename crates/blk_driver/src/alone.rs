//! A queue without a session: for tests, benchmarks and experiments that bring the device half along.
//!
//! Not here: connecting (`device.rs`).

use std::io;
use std::sync::Arc;

use guest_mem::{GuestMemory, MemoryView};
use virtqueue::{DeviceQueue, RingFault, RingFeatures, RingLayout};

use crate::fill::Limits;
use crate::kick::{Doorbell, EventFd};
use crate::memory::{MemoryMap, Pool, PoolOptions};
use crate::queue::{Queue, QueueParts, area_bytes};

/// What the device half needs.
#[derive(Debug)]
pub struct DeviceEnd {
    /// All of it.
    pub memory: Arc<GuestMemory>,
    /// Where the ring lies.
    pub layout: RingLayout,
    /// As given.
    pub features: RingFeatures,
    /// Where a device starts on the new ring.
    pub base: u32,
    /// Signal it when the driver wants to hear of completions.
    pub call: Arc<EventFd>,
}

impl DeviceEnd {
    /// The other half of the ring, which takes as long chains as the driver makes.
    ///
    /// # Errors
    /// [`RingFault`]: never for a queue that was made.
    pub fn device(&self) -> Result<DeviceQueue, RingFault> {
        let view = MemoryView::new(Arc::clone(&self.memory));
        let device = DeviceQueue::new(&view, self.layout, self.features, self.base)?;
        Ok(device.with_indirect_limit(Limits::all().max_segments + 2))
    }
}

/// A queue of `queue_size` with the pool and doorbell given, and what its device needs. The queue takes the device
/// for one that can do everything: flush, discard, write zeroes.
///
/// # Errors
/// No memory or descriptors.
pub fn alone(
    queue_size: u16,
    features: RingFeatures,
    pool: PoolOptions,
    bell: Arc<dyn Doorbell>,
) -> io::Result<(Queue, Pool, DeviceEnd)> {
    alone_with(queue_size, features, Limits::all(), pool, bell)
}

/// [`alone`] with a device that can do what `limits` say.
pub(crate) fn alone_with(
    queue_size: u16,
    features: RingFeatures,
    limits: Limits,
    pool: PoolOptions,
    bell: Arc<dyn Doorbell>,
) -> io::Result<(Queue, Pool, DeviceEnd)> {
    let map = MemoryMap::new();
    let region = map.add_private(area_bytes(queue_size, limits.max_segments)).map_err(io::Error::other)?;
    let pool = map.add_pool(pool).map_err(io::Error::other)?;
    let parts = QueueParts {
        index: 0,
        queue_size,
        features,
        limits,
        area: region.spec().guest_addr,
        region,
        map: Arc::clone(&map),
        pool: pool.clone(),
        bell,
        notice: None,
    };
    let queue = Queue::new(parts).map_err(io::Error::other)?;
    let (place, call) = (queue.link().place(), Arc::clone(queue.link().call()));
    let end = DeviceEnd { memory: map.memory(), layout: place.layout, features, base: place.base, call };
    Ok((queue, pool, end))
}
