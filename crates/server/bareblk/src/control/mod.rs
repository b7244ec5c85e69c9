//! The control socket and the monitor socket: a versioned protocol that shows and changes a running server.
//!
//! `listener.rs (who may connect) → session.rs (one client, one line at a time) → protocol/ (line → verb) →
//! dispatch.rs (verb → Control) → answers/ (JSON) → one line back`
//!
//! - An idle client costs one sleeping thread and no wake-ups.
//! - The monitor socket accepts the verbs that only show something, at a limited pace (`pace.rs`).
//! - A client that exceeds a limit of `limits.rs` loses only its own connection.
//!
//! docs/reference/control.md describes the protocol. The client is in `ctl.rs`; `blk_server` and `serving/serving_control.rs`
//! make the changes.

pub mod answers;

pub mod limits;

pub mod listener;

mod clients;

mod session;

mod pace;

mod line_reader;

pub mod refused;

pub mod disk_names;

pub mod protocol;

pub mod dispatch;

pub mod worker_settings;

#[cfg(test)]
mod rig;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use blk_server::{Attached, ServerReport, SlowRequest, WorkerId, WorkerOptions};
use serde_json::{Map, Value};

use answers::jobs::JobReport;
use answers::reports::{Overlaid, ReloadAnswer, Waiting};
use disk_names::KnownDisk;
use protocol::verbs::{JobChange, JobStart, LiveUpgrade};
use refused::Refused;

/// The server, as control clients see and change it.
///
/// Several clients' threads may call it at once. A call may take as long as its `timeout`.
pub trait Control: Send + Sync {
    /// The disks, in the order in which they were added.
    fn disks(&self) -> Vec<KnownDisk>;

    /// The disks that are not served yet.
    fn waiting(&self) -> Vec<Waiting>;

    /// Reads all counters.
    fn report(&self) -> ServerReport;

    /// Returns the time from which requests of the disk count as slow, and the latest slow requests.
    fn slow_requests(&self, disk: &str) -> Result<(Option<Duration>, Vec<SlowRequest>), Refused>;

    /// Starts one more worker.
    fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, Refused>;

    /// Moves the worker's queues to the others, then ends it.
    fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), Refused>;

    /// Moves a queue to another worker.
    fn attach(
        &self,
        disk: &str,
        queue: u16,
        worker: WorkerId,
        timeout: Duration,
    ) -> Result<Attached, Refused>;

    /// Sets the completion worker of a disk; `None`: the workers choose.
    fn set_completion_worker(
        &self,
        disk: &str,
        worker: Option<WorkerId>,
        timeout: Duration,
    ) -> Result<(), Refused>;

    /// Adds a disk, described by the keys of a `[[disk]]` table. Returns its name.
    fn add_disk(&self, table: Map<String, Value>) -> Result<String, Refused>;

    /// Stops serving a disk.
    fn remove_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<(), Refused>;

    /// Changes a disk's size.
    fn resize_disk(&self, name: &str, size_bytes: u64, force: bool) -> Result<(), Refused>;

    /// Retries a disk's parked requests. Returns their number.
    fn resume_disk(&self, name: &str, timeout: Duration) -> Result<usize, Refused>;

    /// Changes the limits of a disk. `set`: the keys of a `[[disk]]` table; null removes a limit. Returns whether a
    /// reload will restore the limits of the configuration file.
    fn limit_disk(&self, name: &str, set: &Map<String, Value>) -> Result<bool, Refused>;

    /// Like [`Control::limit_disk`], for a group.
    fn limit_group(&self, name: &str, set: &Map<String, Value>) -> Result<bool, Refused>;

    /// Makes a disk's completed writes durable.
    fn flush_disk(&self, name: &str, timeout: Duration) -> Result<(), Refused>;

    /// A disk's settings, as keys of a `[[disk]]` table.
    fn settings(&self, name: &str) -> Result<BTreeMap<String, String>, Refused>;

    /// Checks that the workers respond. Returns those that did not respond in time.
    fn silent_workers(&self, timeout: Duration) -> Result<Vec<WorkerId>, Refused>;

    /// Runs `hold` while a disk is drained and flushed. Returns how long the disk was paused.
    fn pause(&self, name: &str, timeout: Duration, hold: &mut dyn FnMut()) -> Result<Duration, Refused>;

    /// Clones the disks' images to new files at one instant: all or none. Returns how long the disks were paused.
    fn snapshot(&self, files: &[(String, PathBuf)], timeout: Duration) -> Result<Duration, Refused>;

    /// Puts new qcow2 images over the disks' images, at one instant.
    fn overlay(&self, files: &[(String, PathBuf)], timeout: Duration) -> Result<Overlaid, Refused>;

    /// The last job of each disk.
    fn jobs(&self) -> Vec<JobReport>;

    /// Starts a job that merges a disk's layers.
    fn start_job(&self, job: &JobStart) -> Result<(), Refused>;

    /// Pauses or resumes a job, or changes its rate.
    fn change_job(&self, change: &JobChange) -> Result<(), Refused>;

    /// Cancels a disk's job, and waits until it has ended.
    fn cancel_job(&self, disk: &str) -> Result<(), Refused>;

    /// Reads the configuration file and the images' sizes again.
    fn reload(&self) -> Result<ReloadAnswer, Refused>;

    /// Hands all disks to the server at the other end of `channel`, and ends the process on success. Calls `agree`,
    /// which answers the client, once nothing prevents the live upgrade; later errors go to `channel`.
    fn live_upgrade(
        &self,
        wanted: LiveUpgrade,
        channel: &UnixStream,
        agree: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<(), Refused>;

    /// Requests a stop of the server without waiting for it.
    fn shutdown(&self);
}
