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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};
    use tempfile::TempDir;

    use super::*;
    use crate::geometry::Alignment;
    use crate::volume::merge::Merge;
    use crate::volume::metadata::MetadataThread;
    use crate::{CacheMode, HostOpener, Image, ImageOptions};

    const CLUSTER: u64 = 64 << 10;
    const TIMEOUT: Duration = Duration::from_secs(60);

    /// An image with one leaked cluster, in use.
    struct Used {
        _folder: TempDir,
        file: Arc<File>,
        image: Image,
        _thread: MetadataThread,
    }

    impl Used {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.qcow2");
            let file = Arc::new(File::options().read(true).write(true).create_new(true).open(&path).unwrap());
            let table_file = TableFile::new(Arc::clone(&file), Alignment::BUFFERED);
            qcow2::create(&table_file, &qcow2::NewImage { size_bytes: 1 << 20, backing: None }).unwrap();
            file.write_all_at(&[7; 64 << 10], 9 * CLUSTER).unwrap();
            file.write_all_at(&1_u16.to_be_bytes(), 2 * CLUSTER + 2 * 9).unwrap();
            let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(&path) };
            let image = Image::open_qcow2(&HostOpener, &options).unwrap();
            let thread = image.backing().start_metadata_thread(|| true).unwrap().unwrap();
            Self { _folder: folder, file, image, _thread: thread }
        }

        fn volume(&self) -> &Arc<Volume> {
            self.image.backing().volume().unwrap()
        }

        fn has_leak(&self) -> bool {
            let mut byte = [0];
            self.file.read_exact_at(&mut byte, 9 * CLUSTER).unwrap();
            byte[0] == 7
        }
    }

    #[test]
    fn leak_is_freed_after_the_ops_that_began_before_the_end_of_the_scan() {
        let used = Used::new();
        let eventfd = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let mut engine = used.volume().join(eventfd).unwrap();
        let mut job = Merge::begin(used.volume(), TIMEOUT).unwrap();
        let op = engine.begin();
        job.begin_reclaim().unwrap();
        while !job.reclaim().unwrap().waits_for_requests {}
        for _ in 0..20 {
            let step = job.reclaim().unwrap();
            assert!(step.waits_for_requests && !step.has_ended && used.has_leak(), "{step:?}");
        }
        engine.end(op);
        let step = std::iter::repeat_with(|| job.reclaim().unwrap()).find(|step| step.has_ended).unwrap();
        assert_eq!((step.freed_clusters, step.freed_bytes, used.has_leak()), (1, CLUSTER, false));
        job.end(TIMEOUT).unwrap();
    }

    #[test]
    fn failed_sync_of_another_thread_ends_the_job_and_refuses_the_next() {
        let used = Used::new();
        let mut job = Merge::begin(used.volume(), TIMEOUT).unwrap();
        job.begin_reclaim().unwrap();
        used.volume().note_failed_sync();
        let why = job.reclaim().unwrap_err();
        assert!(why.contains("a.qcow2: a sync of it has failed earlier") && used.has_leak(), "{why}");
        assert_eq!(job.begin_reclaim().unwrap_err(), why);
    }
}
