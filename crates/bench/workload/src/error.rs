//! Why a job cannot run on a target, as messages for the user.

use std::path::PathBuf;

use blk_driver::ConnectError;
use disk_image::{ImageError, LockHolder};

use crate::job::JobError;
use crate::job::units::list;

/// Why a job could not be run at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The job does not fit the target.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The path does not exist.
    #[error("socket {path:?} does not exist: start the back-end first")]
    NoSocket {
        /** The target's path. */
        path: PathBuf,
    },
    /// The path is not a socket.
    #[error("{path:?} is not a socket: use --file for a file or block device")]
    NotASocket {
        /** The target's path. */
        path: PathBuf,
    },
    /// The path cannot be examined.
    #[error("cannot examine socket {path:?}")]
    Socket {
        /** The target's path. */
        path: PathBuf,
        /** The kernel's error. */
        source: std::io::Error,
    },
    /// No process listens on the socket.
    #[error("socket {path:?} refuses connections: its back-end no longer runs; start the back-end again")]
    Refused {
        /** The target's path. */
        path: PathBuf,
    },
    /// No session could be established.
    #[error("cannot use socket {path:?}")]
    Connect {
        /** The target's path. */
        path: PathBuf,
        /** The driver's error. */
        source: ConnectError,
    },
    /// The depth is more than a ring holds.
    #[error(
        "iodepth={depth} is too large: a queue of {queue_size} descriptors holds {most} requests; give iodepth={most} \
         or less, more jobs, or a larger --queue-size (1024 at most)"
    )]
    Depth {
        /** The value of `iodepth=`. */
        depth: u32,
        /** Number of requests that fit in the queue. */
        most: u32,
        /** Number of descriptors of the queue. */
        queue_size: u32,
    },
    /// The job has fewer clones than queues; a clone uses one queue.
    #[error(
        "queues={queues} exceeds jobs={jobs}, but each job uses only one queue: give more jobs, or fewer queues"
    )]
    IdleQueues {
        /** The requested number of queues. */
        queues: u16,
        /** The value of `numjobs=`. */
        jobs: u32,
    },
    /// The file cannot be used.
    #[error(transparent)]
    Image(ImageError),
    /// Another process writes to the file, or prevents this one from writing.
    #[error(
        "{path:?} is in use by {}: stop that process first; while a server serves this file, it can only be read, and \
         only if the server serves it read-only",
        who(holders)
    )]
    InUse {
        /** The target's path. */
        path: PathBuf,
        /** The holders that are visible in /proc. */
        holders: Vec<LockHolder>,
    },
    /// The file does not exist.
    #[error("file {path:?} does not exist: check the path, or create the file first (truncate -s SIZE)")]
    NoFile {
        /** The target's path. */
        path: PathBuf,
    },
    /// The file system does not support O_DIRECT.
    #[error("{path:?} cannot be opened with O_DIRECT: use direct=0, or a file on another file system")]
    NoDirect {
        /** The target's path. */
        path: PathBuf,
    },
    /// A requested CPU does not exist or is not allowed.
    #[error("threads cannot be bound to CPU {cpu}: this process may use CPUs {}", list(allowed))]
    Pin {
        /** The CPU's number. */
        cpu: usize,
        /** The CPUs that exist and that this process may use. */
        allowed: Vec<usize>,
        /** The kernel's error. */
        source: std::io::Error,
    },
    /// A thread could not start.
    #[error("{0}")]
    Begin(String),
}

impl From<ImageError> for RunError {
    fn from(error: ImageError) -> Self {
        match error {
            // The texts of these errors refer to options of the server.
            ImageError::Locked { path, holders, .. } => Self::InUse { path, holders },
            ImageError::DirectRefused { path } => Self::NoDirect { path },
            ImageError::Missing { path } => Self::NoFile { path },
            other => Self::Image(other),
        }
    }
}

fn who(holders: &[LockHolder]) -> String {
    let names: Vec<_> = holders.iter().map(ToString::to_string).collect();
    if names.is_empty() { "a process that /proc does not show".to_owned() } else { names.join(", ") }
}
