//! The control socket: a versioned protocol by which an operator looks at a running server and changes it.
//!
//! `listener.rs (who may) → session.rs (one client, one line at a time) → protocol.rs (line → verb) →
//! dispatch.rs (verb → Control) → reports.rs (answer) → one line back`
//!
//! - A client costs a thread that sleeps, and nothing else: not a wake-up, not the server's attention.
//! - Whatever it sends or does not read ends at a limit stated in `limits`, and costs its own connection only.
//!
//! Described for others in docs/reference/control.md. Not here: the client (`ctl.rs`), what is changed (`blk_server`,
//! `serving_control.rs`).

pub mod limits;

pub mod listener;

mod clients;

mod session;

mod line_reader;

pub mod placement;
pub mod protocol;

pub mod balance;

pub mod dispatch;

pub mod worker_settings;

pub mod reports;

#[cfg(test)]
mod rig;

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blk_server::{AdminError, ServerReport, WorkerId, WorkerOptions};
use serde_json::{Map, Value};

use protocol::{ErrorKind, Fault, LiveUpgrade};
use reports::ReloadAnswer;

/// What a client can see and change: the server behind the socket.
///
/// Called on clients' threads, several at once. May take as long as its `timeout` says.
pub trait Control: Send + Sync {
    /// A reading of everything that is counted.
    fn report(&self) -> ServerReport;

    /// Starts one more worker.
    fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, Refused>;

    /// Moves the worker's queues to the others, then ends it.
    fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), Refused>;

    /// Hands a queue to another worker.
    fn attach(&self, disk: &str, queue: u16, worker: WorkerId, timeout: Duration) -> Result<(), Refused>;

    /// Makes another worker the completion worker of a disk; `None`: the workers choose.
    fn set_completion_worker(
        &self,
        disk: &str,
        worker: Option<WorkerId>,
        timeout: Duration,
    ) -> Result<(), Refused>;

    /// Serves one more disk, described as a `[[disk]]` table of the configuration file is. Gives its name.
    fn add_disk(&self, table: Map<String, Value>) -> Result<String, Refused>;

    /// Stops serving a disk.
    fn remove_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<(), Refused>;

    /// Gives a disk another size.
    fn resize_disk(&self, name: &str, size_bytes: u64, force: bool) -> Result<(), Refused>;

    /// Has a disk's parked requests tried again. Gives how many there are.
    fn resume_disk(&self, name: &str, timeout: Duration) -> Result<usize, Refused>;

    /// Reads the configuration file, and the images' sizes, again.
    fn reload(&self) -> Result<ReloadAnswer, Refused>;

    /// Hands all disks to whoever is at the other end of `channel`, and ends the process if that comes about. `agree` is called when nothing
    /// is in the way, and says so to the client; what goes wrong after that is told on `channel`.
    fn live_upgrade(
        &self,
        wanted: LiveUpgrade,
        channel: &UnixStream,
        agree: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<(), Refused>;

    /// Asks for a stop and does not wait for it.
    fn shutdown(&self);
}

/// Why a server did not do it.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// From the server.
    #[error(transparent)]
    Server(#[from] AdminError),
    /// Settings that are wrong in themselves; the text names them.
    #[error("{0}")]
    Settings(String),
    /// Anything else.
    #[error(transparent)]
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for Refused {
    /// The server's own reasons are told apart, whoever hands them on.
    fn from(error: anyhow::Error) -> Self {
        error.downcast().map_or_else(Self::Failed, Self::Server)
    }
}

impl From<Refused> for Fault {
    fn from(refused: Refused) -> Self {
        let kind = match &refused {
            Refused::Server(error) => kind(error),
            Refused::Settings(_) => ErrorKind::BadSettings,
            Refused::Failed(_) => ErrorKind::Failed,
        };
        Self::new(kind, format!("{:#}", anyhow::Error::from(refused)))
    }
}

fn kind(error: &AdminError) -> ErrorKind {
    match error {
        AdminError::NoDisk { .. } => ErrorKind::NoDisk,
        AdminError::DiskExists { .. } => ErrorKind::DiskExists,
        AdminError::NoWorker { .. } => ErrorKind::NoWorker,
        AdminError::NoQueue { .. } => ErrorKind::NoQueue,
        AdminError::LastWorker { .. } => ErrorKind::LastWorker,
        AdminError::NotPlaced { .. } => ErrorKind::NotPlaced,
        AdminError::NotDrained { .. } | AdminError::CompletionWorkerStays { .. } => ErrorKind::NotDrained,
        AdminError::Unsuitable { .. } => ErrorKind::Unsuitable,
        AdminError::InUse { .. } => ErrorKind::InUse,
        AdminError::WouldShrink { .. } => ErrorKind::WouldShrink,
        // Includes whatever reasons the server has that clients need not tell apart.
        _ => ErrorKind::Failed,
    }
}
