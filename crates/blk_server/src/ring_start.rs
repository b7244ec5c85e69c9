//! A ring is opened where the last device left it, whatever the front-end believes.
//!
//! `SET_VRING_BASE + ring in memory → DeviceQueue`, one log line if they disagree
//!
//! - A base is checked here and not when it is sent: what it has to look like depends on the ring's format,
//!   and front-ends may negotiate later.
//! - A split ring knows where it goes on. A packed one often does; where it does not, the front-end's base counts,
//!   and one that cannot be true costs this queue and no other.
//!
//! Spec: vhost-user, "Ring states", SET_VRING_BASE. Not here: positions and rings (`virtqueue`), the queue's
//! life afterwards (`queue.rs`).

use std::time::Instant;

use guest_mem::MemoryView;
use tracing::warn;
use virtio_blk::WriteCache;
use virtqueue::{DeviceQueue, RingLayout};

use crate::error_line::error_line;
use crate::log_limit::Allowed;
use crate::workers::QueueStart;

/// # Errors
/// What is wrong with the ring or its base.
pub(crate) fn open_ring(
    start: &QueueStart,
    view: &MemoryView,
    layout: RingLayout,
) -> Result<DeviceQueue, String> {
    let base = start.base;
    if !start.ring.packed && base > u32::from(u16::MAX) {
        return Err(format!("ring base {base:#x} does not fit the 16 bits of a split ring's index"));
    }
    let ring = DeviceQueue::new(view, layout, start.ring, base).map_err(|fault| error_line(&fault))?;
    if ring.position() != base {
        log_other_position(start, &ring);
    }
    if !ring.was_fresh() && start.cache_choice_unknown && !start.disk.ignores_flushes() {
        assume_writethrough(start);
    }
    Ok(ring)
}

/// A front-end that knows nothing of packed rings' wrap counters and says 0 for a fresh one is not worth a line.
fn log_other_position(start: &QueueStart, ring: &DeviceQueue) {
    if start.ring.packed && ring.was_fresh() {
        return;
    }
    if let Some(Allowed { suppressed }) = start.disk.log_allowed(Instant::now()) {
        let (disk, queue, base, position) = (start.disk.name(), start.index, start.base, ring.position());
        warn!(
            disk,
            queue, suppressed, base, position, "front-end's ring base is stale; the ring's own counts"
        );
    }
}

fn assume_writethrough(start: &QueueStart) {
    if start.disk.guest_cache().assume_writethrough() {
        let disk = start.disk.name();
        warn!(disk, "the guest's cache mode is not known after a restart: every write is made durable");
    }
    start.session.set_write_cache(WriteCache::Writethrough);
}
