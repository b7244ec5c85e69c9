//! Steps of a job that frees leaked clusters of the top. `qcow2::Writer` does the work.
//!
//! What waits for its release looks like a leak. So the writer is told about it: this thread has it, or the volume.

use qcow2::{ReclaimError, Unlinked, View, WriteError, Writer};

use crate::error::line;
use crate::volume::Volume;
use crate::volume::job_step::Progress;
use crate::volume::link::Link;
use crate::volume::table_file::TableFile;

/// `waiting`: what this thread will release.
pub(super) fn begin(
    writer: &mut Writer<TableFile>,
    volume: &Volume,
    waiting: Option<&Unlinked>,
) -> Result<Progress, String> {
    let begun = volume.with_unlinked(|later| {
        let waiting: Vec<&Unlinked> = [waiting, later].into_iter().flatten().collect();
        writer.begin_reclaim(&waiting)
    });
    begun.map(|()| Progress::default()).map_err(|error| why(volume, &error))
}

pub(super) fn step(
    writer: &mut Writer<TableFile>,
    volume: &Volume,
    view: &mut dyn View,
    link: &Link,
) -> Result<Progress, String> {
    let step = writer.reclaim(view).map_err(|error| {
        if matches!(error, ReclaimError::Write(WriteError::Sync(_))) {
            link.note_failed_sync();
        }
        why(volume, &error)
    })?;
    let to = u128::from(volume.size_bytes()) * u128::from(step.done) / u128::from(step.total).max(1);
    Ok(Progress {
        to: u64::try_from(to).unwrap_or(u64::MAX),
        freed_clusters: step.freed_clusters,
        freed_bytes: step.freed_clusters.saturating_mul(writer.header().geometry.cluster_bytes()),
        has_ended: step.has_ended,
        ..Progress::default()
    })
}

fn why(volume: &Volume, error: &ReclaimError) -> String {
    format!("image {}: {}", volume.top_path().display(), line(error))
}
