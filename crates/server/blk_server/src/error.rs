//! Errors: why a server does not start, and why a running server refuses a change. Names are escaped, so each error is
//! one line.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use sandbox::SandboxError;

use crate::data_path::disk::InvalidDisk;
use crate::data_path::throttle::limits::InvalidLimits;
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptionsError};
use crate::host::listener::SocketError;

/// Why the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An engine could not be created, or a worker could not be started.
    #[error("cannot start the I/O engine")]
    Engine(#[source] io::Error),
    /// A worker's thread cannot run with its options.
    #[error("cannot apply the CPU or scheduling settings of worker {id}")]
    Worker {
        /** The worker's number. */
        id: WorkerId,
        /** The reason. */
        #[source]
        source: WorkerOptionsError,
    },
    /// A worker's thread would have more rights than it needs.
    #[error("worker {id} cannot restrict its system calls")]
    Sandbox {
        /** The worker's number. */
        id: WorkerId,
        /** The reason. */
        #[source]
        source: SandboxError,
    },
    /// The engine's depth is too small for one request.
    #[error("engine depth {depth} is too small: one request may need {min} operations")]
    Depth {
        /** The configured depth. */
        depth: u32,
        /** The largest number of operations of one request. */
        min: u32,
    },
    /// The process has no free threads or descriptors.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// Two disks have the same name.
    #[error("two disks are named `{name}`: give each disk its own name", name = name.escape_debug())]
    NameTwice {
        /** The disk's name. */
        name: String,
    },
    /// Two disks have the same socket.
    #[error(
        "socket {} already belongs to disk `{other}`: give each disk its own socket",
        path.display(),
        other = other.escape_debug()
    )]
    SocketTwice {
        /** The socket's path. */
        path: PathBuf,
        /** The disk that has the socket. */
        other: String,
    },
    /// The server is stopping and accepts no further disks.
    #[error("the server is stopping")]
    Stopping,
    /// See [`InvalidDisk`].
    #[error(transparent)]
    Disk(#[from] InvalidDisk),
    /// See [`SocketError`].
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// Why the server refused a change. Unless the variant says otherwise, nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The disk does not exist.
    #[error("there is no disk `{name}`", name = name.escape_debug())]
    NoDisk {
        /** The disk's name. */
        name: String,
    },
    /// The name is taken.
    #[error("a disk named `{name}` already exists", name = name.escape_debug())]
    DiskExists {
        /** The disk's name. */
        name: String,
    },
    /// The worker does not exist.
    #[error("there is no worker {id}")]
    NoWorker {
        /** The worker's number. */
        id: WorkerId,
    },
    /// The disk has no queue with this number.
    #[error("disk `{disk}` has no queue {queue}: it has {queues} queues, counted from 0", disk = disk.escape_debug())]
    NoQueue {
        /** The disk's name. */
        disk: String,
        /** The queue's number. */
        queue: u16,
        /** The disk's number of queues. */
        queues: u16,
    },
    /// The last worker cannot be removed.
    #[error("worker {id} is the last worker: add another worker first")]
    LastWorker {
        /** The worker's number. */
        id: WorkerId,
    },
    /// Requests in flight did not complete in time; the queue stays on its worker.
    #[error(
        "queue {queue} of disk `{disk}` still has requests in flight after {} s, so the queue stays on worker {stays}",
        timeout.as_secs_f64(),
        disk = disk.escape_debug()
    )]
    NotDrained {
        /** The disk's name. */
        disk: String,
        /** The queue's number. */
        queue: u16,
        /** The time limit that has passed. */
        timeout: Duration,
        /** The worker that still serves the queue. */
        stays: WorkerId,
    },
    /// The queue takes too long to start; it stays on its worker.
    #[error(
        "queue {queue} of disk `{disk}` is still being started after {} s: try again",
        timeout.as_secs_f64(),
        disk = disk.escape_debug()
    )]
    NotStarted {
        /** The disk's name. */
        disk: String,
        /** The queue's number. */
        queue: u16,
        /** The time limit that has passed. */
        timeout: Duration,
    },
    /// The worker does not answer: it may hang in an image's file system.
    #[error("worker {id} has not answered within {} s: check whether the storage of a disk hangs", timeout.as_secs_f64())]
    WorkerSilent {
        /** The worker's number. */
        id: WorkerId,
        /** The time limit that has passed. */
        timeout: Duration,
    },
    /// Workers and queues allow one change at a time.
    #[error("another change of workers or queues is still in progress after {} s: try again", timeout.as_secs_f64())]
    OthersChange {
        /** The time limit that has passed. */
        timeout: Duration,
    },
    /// The server is stopping and accepts no more changes.
    #[error("the server is stopping")]
    Stopping,
    /// The new worker cannot serve the disk: for example, its engine cannot use the image.
    #[error("worker {id} cannot serve disk `{disk}`: {why}", disk = disk.escape_debug())]
    Unsuitable {
        /** The worker's number. */
        id: WorkerId,
        /** The disk's name. */
        disk: String,
        /** The reason. */
        why: String,
    },
    /// The group does not exist.
    #[error(
        "there is no group `{group}`: define it in a [[group]] table, or choose an existing group",
        group = group.escape_debug()
    )]
    NoGroup {
        /** The group's name. */
        group: String,
    },
    /// The limits are invalid.
    #[error("{what} `{name}`: {source}", name = name.escape_debug())]
    Limits {
        /** A disk or a group. */
        what: &'static str,
        /** Its name. */
        name: String,
        /** The mistake. */
        source: InvalidLimits,
    },
    /// The disk's placement is `queue`.
    #[error(
        "disk `{disk}` has no completion worker: its placement is queue, so each worker completes its own requests; \
         serve the disk with --placement completion or shared",
        disk = disk.escape_debug()
    )]
    NotPlaced {
        /** The disk's name. */
        disk: String,
    },
    /// Requests in flight did not complete in time; the completion worker is unchanged.
    #[error(
        "disk `{disk}` still has requests in flight after {} s, so its completion worker is unchanged",
        timeout.as_secs_f64(),
        disk = disk.escape_debug()
    )]
    CompletionWorkerStays {
        /** The disk's name. */
        disk: String,
        /** The time limit that has passed. */
        timeout: Duration,
    },
    /// A front-end is using the disk.
    #[error("disk `{disk}` is in use by a front-end: stop its guest first, or force the removal", disk = disk.escape_debug())]
    InUse {
        /** The disk's name. */
        disk: String,
    },
    /// Another change of the disk is in progress.
    #[error("another client is changing or removing disk `{disk}`: try again when that change has ended", disk = disk.escape_debug())]
    Busy {
        /** The disk's name. */
        disk: String,
    },
    /// The removal is incomplete: the disk has no front-ends, and accepts none.
    #[error(
        "disk `{disk}` still has requests in flight although the server cancelled them after {} s: the disk accepts \
         no front-ends and keeps its image open; repeat the removal when its storage responds",
        timeout.as_secs_f64(),
        disk = disk.escape_debug()
    )]
    StillInFlight {
        /** The disk's name. */
        disk: String,
        /** The time limit that has passed. */
        timeout: Duration,
    },
    /// The last flush failed. The disk was removed nevertheless.
    #[error(
        "disk `{disk}` was removed, but its last flush failed: writes that its guest had not flushed may be lost",
        disk = disk.escape_debug()
    )]
    NotFlushed {
        /** The disk's name. */
        disk: String,
        /** The kernel's error. */
        #[source]
        source: std::io::Error,
    },
    /// A flush on request failed.
    #[error(
        "disk `{disk}` cannot be flushed: writes since its last flush may not be on stable storage",
        disk = disk.escape_debug()
    )]
    FlushFailed {
        /** The disk's name. */
        disk: String,
        /** The kernel's error. */
        #[source]
        source: std::io::Error,
    },
    /// A guest would notice the other image.
    #[error("the new image of disk `{disk}` would change the {what} that the guest sees", disk = disk.escape_debug())]
    OtherImage {
        /** The disk's name. */
        disk: String,
        /** What would change. */
        what: &'static str,
    },
    /// The image was not cloned.
    #[error("cannot take a snapshot of disk `{disk}`", disk = disk.escape_debug())]
    NotCloned {
        /** The disk's name. */
        disk: String,
        /** The reason. */
        #[source]
        source: disk_image::CloneError,
    },
    /// The image cannot have the requested size.
    #[error("cannot resize disk `{disk}`", disk = disk.escape_debug())]
    Resize {
        /** The disk's name. */
        disk: String,
        /** The reason. */
        #[source]
        source: disk_image::ResizeError,
    },
    /// A disk must not shrink while a guest uses it.
    #[error(
        "disk `{disk}` has {from_bytes} bytes: shrinking it to {to_bytes} bytes loses the data beyond that size; \
         force the change to shrink it anyway",
        disk = disk.escape_debug()
    )]
    WouldShrink {
        /** The disk's name. */
        disk: String,
        /** The current size. */
        from_bytes: u64,
        /** The requested size. */
        to_bytes: u64,
    },
    /// A system call failed.
    #[error("cannot {action}")]
    System {
        /** The attempted action. */
        action: String,
        /** The kernel's error. */
        #[source]
        source: std::io::Error,
    },
    /// A thread or an engine did not start, or the disk or its socket is invalid.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// One of each error, all with the disk's name.
    fn errors_of(name: &str) -> Vec<AdminError> {
        let (disk, other, path) = (name.to_owned(), name.to_owned(), PathBuf::from("s"));
        let (id, queue, timeout) = (WorkerId(0), 1, Duration::from_secs(1));
        let source = || io::Error::other("x");
        let too_small =
            disk_image::ResizeError::WouldShrink { path: path.clone(), from_bytes: 2, wanted_bytes: 1 };
        vec![
            AdminError::NoDisk { name: disk.clone() },
            AdminError::DiskExists { name: disk.clone() },
            AdminError::NoQueue { disk: disk.clone(), queue, queues: 1 },
            AdminError::NotDrained { disk: disk.clone(), queue, timeout, stays: id },
            AdminError::NotStarted { disk: disk.clone(), queue, timeout },
            AdminError::Unsuitable { id, disk: disk.clone(), why: "x".into() },
            AdminError::NotPlaced { disk: disk.clone() },
            AdminError::NoGroup { group: disk.clone() },
            AdminError::Limits {
                what: "disk",
                name: disk.clone(),
                source: InvalidLimits::LengthWithoutMax { rate: "iops" },
            },
            AdminError::CompletionWorkerStays { disk: disk.clone(), timeout },
            AdminError::InUse { disk: disk.clone() },
            AdminError::Busy { disk: disk.clone() },
            AdminError::StillInFlight { disk: disk.clone(), timeout },
            AdminError::NotFlushed { disk: disk.clone(), source: source() },
            AdminError::FlushFailed { disk: disk.clone(), source: source() },
            AdminError::NotCloned {
                disk: disk.clone(),
                source: disk_image::CloneError::BlockDevice { image: path.clone() },
            },
            AdminError::Resize { disk: disk.clone(), source: too_small },
            AdminError::WouldShrink { disk, from_bytes: 2, to_bytes: 1 },
            AdminError::Start(Box::new(ServerError::NameTwice { name: name.to_owned() })),
            AdminError::Start(Box::new(ServerError::SocketTwice { path, other })),
        ]
    }

    #[test]
    fn control_characters_of_a_name_are_escaped_in_every_error() {
        for error in errors_of("a\n\u{1b}[2J") {
            let line = error.to_string();
            assert!(!line.contains(char::is_control), "{line:?}");
            assert!(line.contains(r"a\n\u{1b}[2J"), "{line}");
        }
    }
}
