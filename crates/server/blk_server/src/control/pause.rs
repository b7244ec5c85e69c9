//! Flushes disks, pauses them, and takes snapshots of them.
//!
//! `disks' turns (no removal, no resize) → queues drained → flushed → act, or clone each image → queues continue`

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info;

use crate::control::exports::{Export, Exports, Turn};
use crate::data_path::assignment::WorkerSet;
use crate::data_path::assignment::deadline::deadline_in;
use crate::data_path::disk::Disk;
use crate::data_path::disk::flush::flush;
use crate::error::AdminError;

/// Makes durable all writes that the disk has completed.
pub(crate) fn flush_disk(export: &Export, timeout: Duration) -> Result<(), AdminError> {
    flush_now(&export.disk, deadline_in(timeout))
}

pub(crate) fn flush_now(disk: &Arc<Disk>, deadline: Instant) -> Result<(), AdminError> {
    flush(disk, deadline).map_err(|source| AdminError::FlushFailed { disk: disk.name().to_owned(), source })
}

/// Runs `act` while the disks are drained and flushed. Returns its result, and how long the disks were paused.
pub(crate) fn while_paused<T>(
    exports: &Exports,
    workers: &WorkerSet,
    names: &[String],
    timeout: Duration,
    act: impl FnOnce(&[Arc<Disk>]) -> T,
) -> Result<(T, Duration), AdminError> {
    let found: Vec<Arc<Export>> = names.iter().map(|name| exports.find(name)).collect::<Result<_, _>>()?;
    let _turns: Vec<Turn> = found.iter().map(Export::take_turn).collect::<Result<_, _>>()?;
    let disks: Vec<Arc<Disk>> = found.iter().map(|export| Arc::clone(&export.disk)).collect();
    let (begin, deadline) = (Instant::now(), deadline_in(timeout));
    let done = workers.while_paused(&disks, timeout, || {
        // The flush of a failed disk fails.
        let mut flushed = disks.iter().filter(|disk| !disk.ignores_flushes() || disk.has_failed());
        flushed.try_for_each(|disk| flush_now(disk, deadline))?;
        Ok::<T, AdminError>(act(&disks))
    })?;
    let paused = begin.elapsed();
    info!(disks = names.join(", "), paused = ?paused, "the disks resume after a pause");
    done.map(|done| (done, paused))
}

/// Clones the images of several disks at one instant, each into an empty file. Returns how long the disks were paused.
pub(crate) fn snapshot(
    exports: &Exports,
    workers: &WorkerSet,
    clones: &[(String, File)],
    timeout: Duration,
) -> Result<Duration, AdminError> {
    let names: Vec<String> = clones.iter().map(|(name, _)| name.clone()).collect();
    let clone = |(disk, (name, file)): (&Arc<Disk>, &(String, File))| {
        let cloned = disk.image().clone_to(file);
        cloned.map_err(|source| AdminError::NotCloned { disk: name.clone(), source })
    };
    let (cloned, paused) = while_paused(exports, workers, &names, timeout, |disks| {
        disks.iter().zip(clones).try_for_each(clone)
    })?;
    cloned.map(|()| paused)
}
