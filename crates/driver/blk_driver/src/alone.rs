//! A queue without a session, for tests, benchmarks and experiments that provide their own device half.

use std::io;
use std::sync::Arc;

use guest_mem::{GuestMemory, MemoryView};
use virtqueue::{DeviceQueue, RingFault, RingFeatures, RingLayout};

use crate::kick::{Doorbell, EventFd};
use crate::memory::{MemoryMap, Pool, PoolOptions};
use crate::queue::area::area_bytes;
use crate::queue::fill::Limits;
use crate::queue::{Queue, QueueParts};

/// The resources that the device half needs.
#[derive(Debug)]
pub struct DeviceEnd {
    /// All guest memory, with the ring and the buffers.
    pub memory: Arc<GuestMemory>,
    /// The ring's addresses and size.
    pub layout: RingLayout,
    /// The features given to [`alone`].
    pub features: RingFeatures,
    /// The ring base at which a device starts.
    pub base: u32,
    /// The device signals it when the driver has requested a signal for completions.
    pub call: Arc<EventFd>,
}

impl DeviceEnd {
    /// Makes the device half of the ring. It accepts all chains that the driver can make.
    ///
    /// # Errors
    /// [`RingFault`], but never for an existing queue.
    pub fn device(&self) -> Result<DeviceQueue, RingFault> {
        let view = MemoryView::new(Arc::clone(&self.memory));
        let device = DeviceQueue::new(&view, self.layout, self.features, self.base)?;
        Ok(device.with_indirect_limit(Limits::all().max_segments + 2))
    }
}

/// Makes a queue of `queue_size` descriptors with the given pool and doorbell, and the resources that its device half
/// needs. Assumes a device that supports flush, discard and write zeroes.
///
/// # Errors
/// The kernel has no memory or no file descriptors left.
pub fn alone(
    queue_size: u16,
    features: RingFeatures,
    pool: PoolOptions,
    bell: Arc<dyn Doorbell>,
) -> io::Result<(Queue, Pool, DeviceEnd)> {
    alone_with(queue_size, features, Limits::all(), pool, bell)
}

/// Like [`alone`], with a device that has these `limits`.
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
