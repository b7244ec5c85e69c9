//! Opens a ring at the position where the previous device stopped, even if the front-end sends a different position.
//!
//! `SET_VRING_BASE + ring in memory → DeviceQueue`, one log line if the two disagree
//!
//! - The base is checked here instead of on arrival, because its format depends on the ring format, which may be
//!   negotiated later.
//! - With an in-flight log, the log contains the position. The requests in the log are repeated first.
//! - A split ring contains its position. A packed ring often contains its position too; otherwise the server uses the
//!   front-end's base. An impossible base breaks only this queue.
//!
//! Spec: vhost-user, "Ring states", SET_VRING_BASE.

use std::time::Instant;

use guest_mem::MemoryView;
use tracing::{info, warn};
use virtio_blk::WriteCache;
use virtqueue::{DeviceQueue, Recovery, RingLayout};

use crate::data_path::disk::Disk;
use crate::data_path::disk::log_limit::Allowed;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::queue::queue_start::QueueStart;
use crate::host::error_line::error_line;

/// # Errors
/// The fault of the ring or of its base.
pub(crate) fn open_ring(
    start: &QueueStart,
    view: &MemoryView,
    layout: RingLayout,
) -> Result<DeviceQueue, String> {
    let base = start.base;
    if !start.ring.packed && base > u32::from(u16::MAX) {
        return Err(format!("ring base {base:#x} does not fit the 16 bits of a split ring's index"));
    }
    let opened = match &start.log {
        None => DeviceQueue::new(view, layout, start.ring, base),
        Some(log) => DeviceQueue::with_log(view, layout, start.ring, base, log),
    };
    let ring = opened.map_err(|fault| error_line(&fault))?;
    if start.log.as_ref().is_some_and(|log| log.memory().is_poisoned()) {
        return Err("the front-end truncated the file of its in-flight log".into());
    }
    match ring.recovery() {
        Recovery { redone: 0, was_foreign: false } if ring.position() == base => {}
        Recovery { redone: 0, was_foreign: false } => log_other_position(start, &ring),
        recovery => log_recovery(start, recovery),
    }
    if !ring.was_fresh() && start.cache_choice_unknown && !start.disk.ignores_flushes() {
        assume_writethrough(&start.disk, &start.session);
    }
    Ok(ring)
}

/// Logs that the front-end sent a position different from the ring's own. Logs nothing for a fresh packed ring, for
/// which front-ends that ignore wrap counters send 0.
fn log_other_position(start: &QueueStart, ring: &DeviceQueue) {
    if start.ring.packed && ring.was_fresh() {
        return;
    }
    if let Some(Allowed { suppressed }) = start.disk.log_allowed(Instant::now()) {
        let (disk, queue, base, position) = (start.disk.name(), start.index, start.base, ring.position());
        warn!(
            disk,
            queue,
            suppressed,
            base,
            position,
            "the front-end's ring base is stale; using the ring's own position"
        );
    }
}

/// Logs that the previous server had requests in flight, or that the front-end sent another ring's log.
fn log_recovery(start: &QueueStart, Recovery { redone, was_foreign }: Recovery) {
    let Some(Allowed { suppressed }) = start.disk.log_allowed(Instant::now()) else { return };
    let (disk, queue) = (start.disk.name(), start.index);
    if was_foreign {
        warn!(
            disk,
            queue,
            suppressed,
            "the front-end's in-flight log belongs to another ring; its requests are not repeated"
        );
    } else {
        info!(disk, queue, suppressed, redone, "repeating requests that the previous server had in flight");
    }
}

/// Makes every write durable, because the guest may have disabled its cache unseen by this process.
pub(crate) fn assume_writethrough(disk: &Disk, session: &SessionLink) {
    if disk.guest_cache().assume_writethrough() {
        let disk = disk.name();
        warn!(
            disk,
            "the guest's cache mode is unknown after a restart or a migration, so every write is made durable"
        );
    }
    session.set_write_cache(WriteCache::Writethrough);
}
