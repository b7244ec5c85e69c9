//! Why a server does not start, and why a change of a running one is refused.
//!
//! Not here: what ends a session (`session`) or stops a queue (`queue/mod.rs`).

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use sandbox::SandboxError;

use crate::data_path::disk::InvalidDisk;
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptionsError};
use crate::host::listener::SocketError;

/// Why the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An engine could not be made, or a worker not be started.
    #[error("cannot start the I/O engine")]
    Engine(#[source] io::Error),
    /// A worker's thread cannot run as it was to.
    #[error("worker {id}")]
    Worker {
        /** Its number. */
        id: WorkerId,
        /** What is wrong. */
        #[source]
        source: WorkerOptionsError,
    },
    /// A worker's thread would have more rights than it needs.
    #[error("worker {id} does not get its list of system calls")]
    Sandbox {
        /** Its number. */
        id: WorkerId,
        /** Why not. */
        #[source]
        source: SandboxError,
    },
    /// Too few requests in flight.
    #[error("engines of depth {depth}: at least {min} are needed")]
    Depth {
        /** As configured. */
        depth: u32,
        /** One request's most operations. */
        min: u32,
    },
    /// Out of threads or descriptors.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// Two disks with one name.
    #[error("two disks are named `{name}`: give each a name of its own")]
    NameTwice {
        /** As given. */
        name: String,
    },
    /// Two disks with one socket.
    #[error("socket {} is that of disk `{other}` already: give each disk a socket of its own", path.display())]
    SocketTwice {
        /** As given. */
        path: PathBuf,
        /** Who has it. */
        other: String,
    },
    /// No further disks.
    #[error("the server stops")]
    Stopping,
    /// See [`InvalidDisk`].
    #[error(transparent)]
    Disk(#[from] InvalidDisk),
    /// See [`SocketError`].
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// Why a change was not made; nothing has changed then, but where it is said.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// No such disk.
    #[error("there is no disk `{}`", name.escape_debug())]
    NoDisk {
        /** As given. */
        name: String,
    },
    /// The name is taken.
    #[error("there is a disk `{name}` already")]
    DiskExists {
        /** As given. */
        name: String,
    },
    /// No such worker.
    #[error("there is no worker {id}")]
    NoWorker {
        /** As given. */
        id: WorkerId,
    },
    /// The disk has fewer queues.
    #[error("disk `{disk}` has no queue {queue}: it has {queues}, counted from 0")]
    NoQueue {
        /** Its name. */
        disk: String,
        /** As given. */
        queue: u16,
        /** Queues offered. */
        queues: u16,
    },
    /// The last worker stays.
    #[error("worker {id} is the last one: add another first")]
    LastWorker {
        /** As given. */
        id: WorkerId,
    },
    /// Requests in flight did not complete in time; the queue goes on where it was.
    #[error("queue {queue} of disk `{disk}` still has requests in flight after {} s; it stays with worker {stays}", timeout.as_secs_f64())]
    NotDrained {
        /** Its name. */
        disk: String,
        /** Its number. */
        queue: u16,
        /** As given. */
        timeout: Duration,
        /** Who serves it still. */
        stays: WorkerId,
    },
    /// The queue is being started, which took too long; it starts where it was going to.
    #[error("queue {queue} of disk `{disk}` is still being started after {} s: try again", timeout.as_secs_f64())]
    NotStarted {
        /** Its name. */
        disk: String,
        /** Its number. */
        queue: u16,
        /** As given. */
        timeout: Duration,
    },
    /// It hangs, in an image's file system perhaps.
    #[error("worker {id} does not answer after {} s: does the storage of a disk hang?", timeout.as_secs_f64())]
    WorkerSilent {
        /** Its number. */
        id: WorkerId,
        /** As given. */
        timeout: Duration,
    },
    /// One change of workers and queues at a time.
    #[error("another change of workers or queues is still being made after {} s: try again", timeout.as_secs_f64())]
    OthersChange {
        /** As given. */
        timeout: Duration,
    },
    /// No changes any more.
    #[error("the server stops")]
    Stopping,
    /// The new worker cannot serve it (its engine does not take the image, say).
    #[error("worker {id} cannot serve disk `{disk}`: {why}")]
    Unsuitable {
        /** As given. */
        id: WorkerId,
        /** Its name. */
        disk: String,
        /** What went wrong. */
        why: String,
    },
    /// Its placement is `queue`.
    #[error(
        "disk `{disk}` has no completion worker: its placement is queue, where every worker completes what it submits; \
         serve it with --placement completion or shared"
    )]
    NotPlaced {
        /** Its name. */
        disk: String,
    },
    /// Requests in flight did not complete in time; it is as before.
    #[error(
        "disk `{disk}` still has requests in flight after {} s; its completion worker stays as it was", timeout.as_secs_f64()
    )]
    CompletionWorkerStays {
        /** Its name. */
        disk: String,
        /** As given. */
        timeout: Duration,
    },
    /// A front-end is connected.
    #[error("disk `{disk}` is in use by a front-end: stop its guest first, or force it")]
    InUse {
        /** Its name. */
        disk: String,
    },
    /// Somebody else changes it.
    #[error("disk `{disk}` is being changed or removed already: try again when that is over")]
    Busy {
        /** Its name. */
        disk: String,
    },
    /// The one change that is made halfway: its front-ends are gone, and no other gets in.
    #[error(
        "disk `{disk}` still has requests in flight, {} s and a cancellation later: it takes no front-end any more and \
         keeps its image; remove it again when its device answers", timeout.as_secs_f64()
    )]
    StillInFlight {
        /** Its name. */
        disk: String,
        /** As given. */
        timeout: Duration,
    },
    /// The disk is removed all the same.
    #[error(
        "disk `{disk}` is removed, but its last flush failed: what its guest had not flushed itself may be lost"
    )]
    NotFlushed {
        /** Its name. */
        disk: String,
        /** From the kernel. */
        #[source]
        source: std::io::Error,
    },
    /// Not with this size, or not this image.
    #[error("disk `{disk}` keeps its size")]
    Resize {
        /** Its name. */
        disk: String,
        /** What is wrong. */
        #[source]
        source: disk_image::ResizeError,
    },
    /// A disk must not shrink under its guest.
    #[error(
        "disk `{disk}` has {from_bytes} bytes, {to_bytes} are fewer: what lies behind would be lost; force it if that is meant"
    )]
    WouldShrink {
        /** Its name. */
        disk: String,
        /** Now. */
        from_bytes: u64,
        /** As given. */
        to_bytes: u64,
    },
    /// The system refused.
    #[error("cannot {action}")]
    System {
        /** What was tried. */
        action: String,
        /** From the kernel. */
        #[source]
        source: std::io::Error,
    },
    /// A thread or an engine did not start; a disk or a socket is not possible.
    #[error(transparent)]
    Start(#[from] Box<ServerError>),
}

impl From<ServerError> for AdminError {
    fn from(error: ServerError) -> Self {
        match error {
            ServerError::NameTwice { name } => Self::DiskExists { name },
            ServerError::Stopping => Self::Stopping,
            error => Self::Start(Box::new(error)),
        }
    }
}
