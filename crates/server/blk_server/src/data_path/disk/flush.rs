//! Flushes an image when its disk is removed.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use crate::data_path::disk::Disk;

/// Minimum time for the last flush, even if the deadline is earlier.
const LAST_FLUSH_AT_LEAST: Duration = Duration::from_secs(5);

/// Syncs the image unless it is read-only. Uses a separate thread, so that a device that hangs cannot keep the server
/// from ending.
pub(crate) fn flush(disk: &Arc<Disk>, deadline: Instant) -> io::Result<()> {
    if disk.image().read_only() {
        return Ok(());
    }
    let (done, flushed) = sync_channel(1);
    let file = Arc::clone(disk.image().file());
    let flush = move || {
        let result = file.sync_data();
        // Drops the file first, so that the next server does not find the image locked.
        drop(file);
        let _ = done.send(result);
    };
    std::thread::Builder::new().name("bareblk-flush".into()).spawn(flush)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(LAST_FLUSH_AT_LEAST);
    let flushed = flushed.recv_timeout(left).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    match flushed {
        Ok(()) if disk.has_failed() => Err(io::Error::other("an earlier sync failed, and data is lost")),
        other => other,
    }
}
