//! Flushes an image: when an operator requests it, and when its disk is removed or the server stops.
//!
//! `the disk's turn → a thread: sync → (failed: the disk is marked) → result`; the caller waits until its deadline
//!
//! - The thread is separate, so that a device that hangs cannot keep the server from ending.
//! - A sync that fails after the deadline marks the disk, too.
//! - One flush of a disk runs at a time. If the device hangs, further requests for a flush start no threads.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use disk_image::Backing;

use crate::data_path::disk::Disk;
use crate::data_path::disk::flush_turns::FlushTurns;

/// Minimum time for the last flush, even if the deadline is earlier.
const LAST_FLUSH_AT_LEAST: Duration = Duration::from_secs(5);

/// Syncs the image while workers use it, unless it is read-only. Uses a separate file description, because the kernel
/// reports lost pages once to each: the guest's next flush must get the report as well.
pub(crate) fn flush(disk: &Arc<Disk>, deadline: Instant) -> io::Result<()> {
    start_sync(disk, deadline, Disk::reopen_image)?.wait()
}

/// As [`flush`], after the last request of the disk.
pub(crate) fn last_flush(disk: &Arc<Disk>, deadline: Instant) -> io::Result<()> {
    start_last_flush(disk, deadline)?.wait()
}

/// [`last_flush`] without the wait, for several disks at the same time.
pub(crate) fn start_last_flush(disk: &Arc<Disk>, deadline: Instant) -> io::Result<Flush> {
    let deadline = deadline.max(Instant::now() + LAST_FLUSH_AT_LEAST);
    start_sync(disk, deadline, |disk| Ok(disk.image().backing().clone()))
}

/// A flush that runs on its thread.
#[derive(Debug)]
pub(crate) struct Flush {
    /// `None`: a read-only disk needs none.
    synced: Option<Receiver<io::Result<()>>>,
    deadline: Instant,
}

impl Flush {
    /// Waits for the result until the deadline.
    pub fn wait(self) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let synced = self.synced.map(|synced| synced.recv_timeout(left));
        synced.map_or(Ok(()), |synced| synced.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())))
    }
}

fn start_sync(
    disk: &Arc<Disk>,
    deadline: Instant,
    backing: fn(&Disk) -> io::Result<Backing>,
) -> io::Result<Flush> {
    if disk.image().read_only() {
        return Ok(Flush { synced: None, deadline });
    }
    let turn = FlushTurns::take(disk.flush_turns(), deadline)?;
    let (done, synced) = sync_channel(1);
    let disk = Arc::clone(disk);
    let thread = move || {
        let result = sync(&disk, backing);
        // Drops the image first, so that the next server does not find it locked.
        drop((disk, turn));
        let _ = done.send(result);
    };
    std::thread::Builder::new().name("bareblk-flush".into()).spawn(thread)?;
    Ok(Flush { synced: Some(synced), deadline })
}

fn sync(disk: &Disk, backing: fn(&Disk) -> io::Result<Backing>) -> io::Result<()> {
    let backing = backing(disk)?;
    disk.sync_of(&backing)?;
    if backing.volume().is_some_and(|volume| volume.has_sync_failed()) {
        disk.mark_failed();
    }
    match disk.sync_has_failed() {
        true => Err(io::Error::other("an earlier sync failed, so data may be lost")),
        false => Ok(()),
    }
}
