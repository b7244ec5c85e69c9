//! The target of requests, and the client's options that fio does not have.
//!
//! See also: the requests (`job/mod.rs`), access to targets (`file.rs`, `queue.rs`, `shared.rs`).

pub(crate) mod connection;

pub(crate) mod file;

pub(crate) mod port;

pub(crate) mod queue;

pub(crate) mod shared;

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::time::Duration;

use io_engine::EngineKind;

use crate::job::options::engine_word;

/// The target of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A vhost-user-blk back-end.
    Socket(PathBuf),
    /// A file or block device; the engine, if given, replaces the job's.
    File(PathBuf, Option<EngineKind>),
}

/// A text that is not a target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// Neither a valid form nor an existing path.
    #[error("'{text}' does not exist: give socket:PATH, file:PATH, file:PATH:ENGINE, or a path that exists")]
    Missing {
        /** The target as the user wrote it. */
        text: String,
    },
    /// The part after the last colon is not an engine.
    #[error(
        "engine '{engine}' of '{text}' is unknown: give io_uring, libaio, psync, posixaio, threads or mmap"
    )]
    Engine {
        /** The target as the user wrote it. */
        text: String,
        /** The part that is not an engine. */
        engine: String,
    },
}

impl Target {
    /// `socket:PATH`, `file:PATH`, `file:PATH:ENGINE`, or a path, which means a socket if it is one.
    ///
    /// # Errors
    /// [`TargetError`].
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        if let Some(path) = text.strip_prefix("socket:") {
            return Ok(Self::Socket(path.into()));
        }
        if let Some(rest) = text.strip_prefix("file:") {
            return Self::parse_file(text, rest);
        }
        let metadata = std::fs::metadata(text);
        let kind = metadata.map_err(|_| TargetError::Missing { text: text.to_owned() })?.file_type();
        Ok(if kind.is_socket() { Self::Socket(text.into()) } else { Self::File(text.into(), None) })
    }

    fn parse_file(text: &str, rest: &str) -> Result<Self, TargetError> {
        let whole = || Ok(Self::File(rest.into(), None));
        let Some((path, word)) = rest.rsplit_once(':') else { return whole() };
        match engine(word) {
            Some(engine) => Ok(Self::File(path.into(), Some(engine))),
            // The colon is part of the path.
            None if word.contains('/') || std::fs::exists(rest).unwrap_or(false) => whole(),
            None => Err(TargetError::Engine { text: text.to_owned(), engine: word.to_owned() }),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket(path) => write!(f, "socket:{}", path.display()),
            Self::File(path, None) => write!(f, "file:{}", path.display()),
            Self::File(path, Some(engine)) => write!(f, "file:{}:{}", path.display(), engine_word(*engine)),
        }
    }
}

/// Parses an engine's name, either fio's or this project's.
fn engine(word: &str) -> Option<EngineKind> {
    EngineKind::FOR_FILES.into_iter().find(|kind| kind.name() == word || engine_word(*kind) == word)
}

/// Which lock guards a queue that jobs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// A ticket lock: threads spin, and get the lock in the order of their arrival.
    Ticket,
    /// The standard library's mutex.
    Std,
    /// The `parking_lot` crate's mutex.
    ParkingLot,
}

impl LockKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Ticket, Self::Std, Self::ParkingLot];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ticket => "ticket",
            Self::Std => "std",
            Self::ParkingLot => "parking_lot",
        }
    }
}

/// The client's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Number of queues to use on a socket; `None` means one per job, up to the device's number.
    pub queues: Option<u16>,
    /// Descriptors per queue; `None` means enough for the depth.
    pub queue_size: Option<u16>,
    /// Packed or split rings; `None` lets the driver choose.
    pub packed: Option<bool>,
    /// Whether to notify the device while the lock of a shared queue is held. `None`: notifies without the lock. A
    /// queue with only one job has no lock.
    pub kick_locked: Option<bool>,
    /// The lock of each queue. `None`: shared queues have the standard library's lock, and a queue of one job has none.
    pub lock: Option<LockKind>,
    /// Polls for completions instead of sleeping.
    pub poll: bool,
    /// CPUs to pin the threads to, one after another; without CPUs, threads are not pinned.
    pub cpus: Vec<usize>,
    /// How long to wait for a back-end that disconnected.
    pub reconnect: Option<Duration>,
    /// Whether to use an in-flight log; `None` uses one if the back-end supports it and the client reconnects.
    pub in_flight_log: Option<bool>,
    /// How long one request may take.
    pub patience: Duration,
}

/// If a request takes longer, the target counts as broken.
pub const PATIENCE: Duration = Duration::from_secs(30);

impl Default for Client {
    fn default() -> Self {
        Self {
            queues: None,
            queue_size: None,
            packed: None,
            kick_locked: None,
            lock: None,
            poll: false,
            cpus: Vec::new(),
            reconnect: None,
            in_flight_log: None,
            patience: PATIENCE,
        }
    }
}

impl Client {
    /// Whether every queue gets a lock, needed or not, because the user requested one.
    #[must_use]
    pub fn wants_lock(&self) -> bool {
        self.kick_locked.is_some() || self.lock.is_some()
    }

    /// How long one request may take, including a reconnect.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.patience + self.reconnect.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_told_by_their_prefix() {
        assert_eq!(Target::parse("socket:/run/a"), Ok(Target::Socket("/run/a".into())));
        assert_eq!(Target::parse("file:/a/b"), Ok(Target::File("/a/b".into(), None)));
        let engine = Some(EngineKind::LinuxAio);
        assert_eq!(Target::parse("file:/a/b:libaio"), Ok(Target::File("/a/b".into(), engine)));
        assert_eq!(Target::parse("file:/a/b:linux-aio"), Ok(Target::File("/a/b".into(), engine)));
        assert_eq!(Target::parse("file:/a:b/c"), Ok(Target::File("/a:b/c".into(), None)));
    }

    #[test]
    fn plain_path_is_a_socket_if_one_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, file) = (folder.path().join("s"), folder.path().join("f"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::write(&file, "").unwrap();
        assert_eq!(Target::parse(socket.to_str().unwrap()), Ok(Target::Socket(socket)));
        assert_eq!(Target::parse(file.to_str().unwrap()), Ok(Target::File(file, None)));
    }

    #[test]
    fn what_is_no_target_says_what_would_be() {
        let line = Target::parse("/no/such").unwrap_err().to_string();
        assert!(line.contains("/no/such") && line.contains("socket:PATH"), "{line}");
        let line = Target::parse("file:disk:warp").unwrap_err().to_string();
        assert!(line.contains("'warp'") && line.contains("io_uring"), "{line}");
    }
}
