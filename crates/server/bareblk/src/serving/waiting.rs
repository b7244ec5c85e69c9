//! Disks on other machines: each is opened on a thread of its own, so that a server that does not answer delays no
//! other disk.
//!
//! `start → a thread per disk: open → served; or an error → wait, longer each time → open again`
//!
//! - The start waits a few seconds for the disks. A disk whose server is away is not served yet, and the other disks
//!   are. A disk that its server refuses, such as an unknown export, ends the start.
//! - A waiting disk has no socket yet. `ctl list` shows why it waits, and `ctl remove` ends the wait.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use disk_image::ImageError;

use crate::config::difference::{NamedDisk, changed_keys};
use crate::config::disk_settings::DiskSettings;
use crate::serving::Serving;
use crate::serving::open_disk::Origin;
use crate::serving::waiting_disk::WaitingDisk;

/// How long a start waits for its disks on other machines.
const START_WAIT: Duration = Duration::from_secs(10);
/// The first and the longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
/// The pause between two checks whether the disk is still wanted.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Whether a later attempt may succeed although nothing is changed in the configuration.
fn may_pass(error: &Error) -> bool {
    matches!(error.downcast_ref(), Some(ImageError::Unreachable { .. }))
}

impl Serving {
    /// Opens and serves these disks, each on its own thread. Waits a few seconds for the first attempts.
    ///
    /// # Errors
    /// A disk cannot be served as configured.
    pub fn serve_remote(self: &Arc<Self>, disks: Vec<DiskSettings>) -> Result<()> {
        let deadline = Instant::now() + START_WAIT;
        let (tell, outcomes) = sync_channel(disks.len());
        let mut left = disks.len();
        for settings in disks {
            let waiting = Arc::new(WaitingDisk::new(NamedDisk::new(settings, self.opener())));
            self.state().waiting.push(Arc::clone(&waiting));
            let (serving, tell) = (Arc::clone(self), tell.clone());
            std::thread::Builder::new()
                .name("bareblk-remote".into())
                .spawn(move || serving.wait_for(&waiting, &tell))
                .context("cannot start the thread that opens a disk on another machine")?;
        }
        drop(tell);
        while left > 0 {
            match outcomes.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Ok(())) => left -= 1,
                Ok(Err(error)) => return Err(error),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(())
    }

    /// Opens and serves a disk that another server hands over.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn serve_at_once(&self, settings: DiskSettings) -> Result<()> {
        let disk = NamedDisk::new(settings, self.opener());
        let name = disk.name.clone();
        self.serve_disk(disk, Origin::ServedBefore).with_context(|| {
            format!(
                "disk `{name}` is on another machine and cannot be opened a second time: make its server answer, or restart \
                 bareblk without --take-over"
            )
        })
    }

    /// Attempts to serve the disk until it is served or no longer wanted. Tells the outcome of the first attempt.
    fn wait_for(&self, waiting: &Arc<WaitingDisk>, tell: &SyncSender<Result<()>>) {
        let (mut pause, longest) = PAUSES;
        let mut first = true;
        while waiting.is_wanted() && !self.is_stopping() {
            let outcome = self.serve_waiting(waiting);
            let error = match outcome {
                Ok(()) => {
                    let _ = tell.try_send(Ok(()));
                    return;
                }
                Err(error) => error,
            };
            if first && !may_pass(&error) {
                let _ = tell.try_send(Err(error));
                return;
            }
            waiting.note(&error);
            if std::mem::take(&mut first) {
                let _ = tell.try_send(Ok(()));
            }
            self.sleep_while_wanted(waiting, pause);
            pause = (pause * 2).min(longest);
        }
    }

    fn sleep_while_wanted(&self, waiting: &WaitingDisk, pause: Duration) {
        let end = Instant::now() + pause;
        while waiting.is_wanted() && !self.is_stopping() && Instant::now() < end {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn serve_waiting(&self, waiting: &Arc<WaitingDisk>) -> Result<()> {
        let ready = self.open_disk(&waiting.disk, Origin::New)?;
        let _change = self.begin_change()?;
        if waiting.is_wanted() {
            self.serve_ready(waiting.disk.clone(), ready)?;
            self.state().waiting.retain(|other| !Arc::ptr_eq(other, waiting));
            self.manager().status(&self.status());
        }
        Ok(())
    }

    /// The disks that wait for their servers.
    pub fn waiting(&self) -> Vec<Arc<WaitingDisk>> {
        self.state().waiting.clone()
    }

    /// Compares the waiting disks with those of the configuration. Ends the wait of a disk that the configuration no
    /// longer has or has changed. Returns the wanted disks that do not wait, and the names of the disks that the
    /// configuration no longer has.
    pub(super) fn follow_waiting(&self, wanted: Vec<NamedDisk>) -> (Vec<NamedDisk>, Vec<String>) {
        let same = |disk: &NamedDisk| {
            let found = wanted.iter().find(|other| other.name == disk.name);
            found.is_some_and(|other| changed_keys(&disk.settings, &other.settings).is_empty())
        };
        let ended = self.stop_waiting(|disk| !same(disk));
        let waiting = self.waiting();
        let gone = ended.into_iter().filter(|name| !wanted.iter().any(|disk| disk.name == *name)).collect();
        let waits = |disk: &NamedDisk| waiting.iter().any(|waiting| waiting.disk.name == disk.name);
        (wanted.into_iter().filter(|disk| !waits(disk)).collect(), gone)
    }

    /// Ends the wait of those disks that `is_meant` selects, and returns their names. The caller holds the lock of
    /// changes.
    pub(super) fn stop_waiting(&self, is_meant: impl Fn(&NamedDisk) -> bool) -> Vec<String> {
        let ended =
            self.state().waiting.extract_if(.., |waiting| is_meant(&waiting.disk)).collect::<Vec<_>>();
        ended.iter().for_each(|waiting| waiting.give_up());
        ended.into_iter().map(|waiting| waiting.disk.name.clone()).collect()
    }
}
