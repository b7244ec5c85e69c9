//! Steps of a job that frees leaked clusters of the top. `qcow2::Writer` does the work.
//!
//! What waits for its release looks like a leak. So the writer is told about it: this thread has it, or the volume.

use qcow2::{ReclaimError, Unlinked, View, WriteError, Writer};

use crate::error::line;
use crate::volume::Volume;
use crate::volume::job_step::Progress;
use crate::volume::link::{Link, Peer};
use crate::volume::table_file::TableFile;

/// After a failed sync, entries that the kernel has forgotten may be on the disk.
const SYNC_FAILED: &str =
    "a sync of it has failed earlier, so a cluster that looks leaked may be in use: check the host's storage";

/// When all tables had been scanned, and how far the job was.
#[derive(Debug)]
pub(super) struct Scanned {
    epoch: u64,
    progress: Progress,
}

/// `waiting`: what this thread will release.
pub(super) fn begin(
    writer: &mut Writer<TableFile>,
    volume: &Volume,
    link: &Link,
    waiting: Option<&Unlinked>,
) -> Result<Progress, String> {
    check_syncs(volume, link)?;
    let begun = volume.with_unlinked(|later| {
        let waiting: Vec<&Unlinked> = [waiting, later].into_iter().flatten().collect();
        writer.begin_reclaim(&waiting)
    });
    begun.map(|()| Progress::default()).map_err(|error| why(volume, &error))
}

/// One step. Nothing is freed before the ops have ended that began before all tables had been scanned: one of them may still
/// use a cluster to which an entry led.
pub(super) fn step(
    writer: &mut Writer<TableFile>,
    volume: &Volume,
    view: &mut dyn View,
    link: &Link,
    peers: &mut Vec<Peer>,
    scanned: &mut Option<Scanned>,
) -> Result<Progress, String> {
    check_syncs(volume, link)?;
    if let Some(Scanned { epoch, progress }) = scanned
        && !peers.iter().all(|peer| peer.is_since(*epoch))
    {
        return Ok(Progress { waits_for_requests: true, ..*progress });
    }
    let step = writer.reclaim(view).map_err(|error| {
        if matches!(error, ReclaimError::Write(WriteError::Sync(_))) {
            link.note_failed_sync();
        }
        why(volume, &error)
    })?;
    let to = u128::from(volume.size_bytes()) * u128::from(step.done) / u128::from(step.total).max(1);
    let progress = Progress {
        to: u64::try_from(to).unwrap_or(u64::MAX),
        freed_clusters: step.freed_clusters,
        freed_bytes: step.freed_clusters.saturating_mul(writer.header().geometry.cluster_bytes()),
        has_ended: step.has_ended,
        ..Progress::default()
    };
    if step.has_scanned && scanned.is_none() {
        *scanned = Some(Scanned { epoch: link.epochs.begin_next(), progress });
        // An engine that has joined before may have an op that began before.
        link.add_new(peers);
    }
    Ok(progress)
}

fn check_syncs(volume: &Volume, link: &Link) -> Result<(), String> {
    if link.has_sync_failed() {
        return Err(format!("image {}: {SYNC_FAILED}", volume.top_path().display()));
    }
    Ok(())
}

fn why(volume: &Volume, error: &ReclaimError) -> String {
    format!("image {}: {}", volume.top_path().display(), line(error))
}
