//! Changes or rereads a disk's size while the disk is served, and announces it to the guests.
//!
//! A file system that hangs costs one thread and one log line, and delays other disks only by seconds.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use disk_image::{CapacityChange, ResizeError};
use tracing::{error, info};

use crate::control::exports::{Export, Turn};
use crate::error::AdminError;
use crate::host::error_line::error_line;

/// Time limit for a file system to change a file's size. Only metadata changes, but the device may hang.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for reading one image's size. After that, another thread reads the other images.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for all images together.
const READ_ALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Disks whose size has not been read yet.
type Queue = Arc<Mutex<VecDeque<Arc<Export>>>>;

/// Rereads all images' sizes on another thread. If that thread hangs, a new one reads the rest.
pub(crate) fn refresh_all(exports: Vec<Arc<Export>>) {
    let left: Queue = Arc::new(Mutex::new(exports.into()));
    let deadline = Instant::now() + READ_ALL_TIMEOUT;
    while Instant::now() < deadline {
        let (begun, beginnings) = channel();
        let queue = Arc::clone(&left);
        let thread = std::thread::Builder::new().name("bareblk-size".into());
        if let Err(error) = thread.spawn(move || refresh_from(&queue, &begun)) {
            return error!("cannot read the images' sizes: {error}");
        }
        let mut at = None;
        let ended = loop {
            match beginnings.recv_timeout(READ_TIMEOUT) {
                Ok(disk) => at = Some(disk),
                Err(ended) => break ended,
            }
        };
        match (ended, at) {
            (RecvTimeoutError::Timeout, Some(disk)) => error!(
                disk,
                "the image's size was not read within {} s: its file system hangs, or the disk is being changed",
                READ_TIMEOUT.as_secs()
            ),
            _ => return,
        }
    }
    let unread = left.lock().unwrap_or_else(PoisonError::into_inner).drain(..).count();
    error!("the sizes of {unread} more images were not read within {} s", READ_ALL_TIMEOUT.as_secs());
}

/// Sends each disk's name to `begun` before it reads the disk's size.
fn refresh_from(queue: &Queue, begun: &Sender<String>) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let Some(export) = next else { return };
        let _ = begun.send(export.disk.name().to_owned());
        refresh(&export);
    }
}

/// Rereads the image's size. Skips a disk that another thread is changing.
fn refresh(export: &Arc<Export>) {
    let disk = &export.disk;
    let Ok(_turn) = Export::take_turn(export) else { return };
    match disk.image().refresh_capacity() {
        Ok(CapacityChange::Unchanged) => {}
        Ok(CapacityChange::Grown { from, to }) => {
            info!(disk = disk.name(), from, to, "image grew (sectors of 512 bytes)");
            announce(export);
        }
        Ok(CapacityChange::Shrunk { from, to }) => {
            error!(
                disk = disk.name(),
                from, to, "image shrank; the disk keeps its size, and reads beyond the image's end fail"
            );
        }
        Err(error) => error!(disk = disk.name(), "cannot read the image's size: {}", error_line(&error)),
    }
}

/// Resizes on a separate thread, which keeps the disk's turn for as long as the file system needs.
pub(crate) fn resize(export: &Arc<Export>, bytes: u64, force: bool) -> Result<(), AdminError> {
    let turn = Export::take_turn(export)?;
    let system = |source| AdminError::System {
        action: format!("resize disk `{}`", export.disk.name().escape_debug()),
        source,
    };
    let (done, resized) = sync_channel(1);
    let thread = std::thread::Builder::new().name("bareblk-resize".into());
    let started = thread.spawn(move || {
        let result = resize_in_turn(&turn, bytes, force);
        // Ends the turn before it reports the result, because the operator may remove the disk next.
        drop(turn);
        let _ = done.send(result);
    });
    started.map_err(system)?;
    let resized = resized.recv_timeout(RESIZE_TIMEOUT);
    resized.unwrap_or_else(|_| Err(system(io::ErrorKind::TimedOut.into())))
}

fn resize_in_turn(Turn(export): &Turn, bytes: u64, force: bool) -> Result<(), AdminError> {
    let disk = &export.disk;
    let before = disk.image().capacity_sectors();
    let resized = disk.image().resize(bytes, force);
    let to = disk.image().capacity_sectors();
    // Announces the size even if the resize was refused: the device may have been resized to another size.
    if to != before {
        info!(disk = disk.name(), from = before, to, "disk resized (sectors of 512 bytes)");
        announce(export);
    }
    match resized {
        Ok(_) => Ok(()),
        Err(ResizeError::WouldShrink { from_bytes, wanted_bytes: to_bytes, .. }) => {
            Err(AdminError::WouldShrink { disk: disk.name().to_owned(), from_bytes, to_bytes })
        }
        Err(source) => Err(AdminError::Resize { disk: disk.name().to_owned(), source }),
    }
}

fn announce(export: &Export) {
    export.sessions.all().iter().for_each(|session| session.announce_config_change());
}
