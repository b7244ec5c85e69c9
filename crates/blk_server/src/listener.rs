//! Sockets and the one thread that accepts front-ends on all of them.
//!
//! - A socket file left by a dead server is replaced; one that answers is refused.
//! - A front-end gets a thread of its own; a disk without one costs a socket and nothing else.
//!
//! Not here: what a front-end says (`session`).

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use disk_image::{FileId, FileKind, Opener};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tracing::{error, warn};

use crate::log_limit::LogLimit;

/// Bytes of a socket path, without its terminating zero (`sockaddr_un`).
const MAX_PATH_BYTES: usize = 107;
/// Front-ends connected to one disk at a time: two while one replaces another, and some that only look.
pub(crate) const MAX_SESSIONS: usize = 8;
/// From a server's `bind` to its `listen`, with room to spare.
const STARTING_SERVER: std::time::Duration = std::time::Duration::from_millis(100);
/// After an `accept` that failed for want of resources.
const ACCEPT_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

/// Where a disk listens, and who may connect.
#[derive(Clone, Debug)]
pub struct SocketConfig {
    /// Of the socket file; at most 107 bytes.
    pub path: PathBuf,
    /// Permission bits.
    pub mode: u32,
    /// Owner, if not the server's user.
    pub uid: Option<u32>,
    /// Group, if not the server's.
    pub gid: Option<u32>,
}

/// Why a socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Does not fit `sockaddr_un`.
    #[error("socket path {} has {bytes} bytes, at most {max} are possible: use a shorter path", path.display())]
    PathTooLong {
        /** As given. */
        path: PathBuf,
        /** Its length. */
        bytes: usize,
        /** The limit. */
        max: usize,
    },
    /// The folder does not exist.
    #[error("the folder of socket {} does not exist: make it first", path.display())]
    NoFolder {
        /** As given. */
        path: PathBuf,
    },
    /// A server answers there.
    #[error("socket {} is in use by a running server: stop it, or choose another path", path.display())]
    InUse {
        /** As given. */
        path: PathBuf,
    },
    /// Something else has that name.
    #[error("{} exists and is a {kind}, not a socket: choose another path", path.display())]
    NotASocket {
        /** As given. */
        path: PathBuf,
        /** What it is. */
        kind: FileKind,
    },
    /// The system refused.
    #[error("cannot {action} socket {}", path.display())]
    Io {
        /** What was tried. */
        action: &'static str,
        /** As given. */
        path: PathBuf,
        /** From the kernel. */
        #[source]
        source: io::Error,
    },
}

/// A bound socket, removed when dropped.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    path: PathBuf,
    /// The socket file that `bind` made.
    file: FileId,
    opener: Arc<dyn Opener>,
    removed: AtomicBool,
}

impl Socket {
    pub(crate) fn bind(opener: &Arc<dyn Opener>, config: &SocketConfig) -> Result<Self, SocketError> {
        let path = &config.path;
        let failed = |action| move |source: io::Error| SocketError::Io { action, path: path.clone(), source };
        check_path(opener.as_ref(), path)?;
        remove_stale(opener.as_ref(), path)?;
        let fd = opener.bind_socket(path).map_err(failed("bind"))?;
        let file = opener.file_id(path).map_err(failed("look at"))?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(|errno| failed("set up")(errno.into()))?;
        let socket = Self {
            fd,
            path: path.clone(),
            file,
            opener: Arc::clone(opener),
            removed: AtomicBool::new(false),
        };
        let SocketConfig { mode, uid, gid, .. } = *config;
        opener.set_socket_owner(path, mode, uid, gid).map_err(failed("set owner and mode of"))?;
        Ok(socket)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the socket file, once: nobody connects any more, and the path is free for another server.
    pub(crate) fn remove(&self) {
        if self.removed.swap(true, Ordering::Relaxed) {
            return;
        }
        // Somebody may have removed the file and another server have put its own there.
        if self.opener.file_id(&self.path).is_ok_and(|file| file != self.file) {
            return;
        }
        if let Err(error) = self.opener.unlink(&self.path) {
            warn!("socket {} not removed: {error}", self.path.display());
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove();
    }
}

fn check_path(opener: &dyn Opener, path: &Path) -> Result<(), SocketError> {
    let bytes = path.as_os_str().len();
    if bytes > MAX_PATH_BYTES {
        return Err(SocketError::PathTooLong { path: path.to_owned(), bytes, max: MAX_PATH_BYTES });
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let exists = folder.is_none_or(|folder| opener.file_kind(folder).is_ok());
    if exists { Ok(()) } else { Err(SocketError::NoFolder { path: path.to_owned() }) }
}

/// A socket file that nobody answers on any more goes; anything else stays and is an error.
fn remove_stale(opener: &dyn Opener, path: &Path) -> Result<(), SocketError> {
    let failed = |action, source| Err(SocketError::Io { action, path: path.to_owned(), source });
    match opener.file_kind(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return failed("look at", error),
        Ok(FileKind::Socket) => {}
        Ok(kind) => return Err(SocketError::NotASocket { path: path.to_owned(), kind }),
    }
    // Asked twice: a server that is just starting has made the file and does not listen yet.
    let dead = || {
        is_dead(opener, path).map_err(|source| SocketError::Io {
            action: "look who listens on",
            path: path.to_owned(),
            source,
        })
    };
    if !dead()? {
        return Err(SocketError::InUse { path: path.to_owned() });
    }
    std::thread::sleep(STARTING_SERVER);
    if !dead()? {
        return Err(SocketError::InUse { path: path.to_owned() });
    }
    opener.unlink(path).or_else(|error| failed("remove stale", error))
}

fn is_dead(opener: &dyn Opener, path: &Path) -> io::Result<bool> {
    match opener.connect_socket(path) {
        Ok(_) => Ok(false),
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => Ok(true),
            io::ErrorKind::WouldBlock => Ok(false), // alive, with a full queue of connections
            _ => Err(error),
        },
    }
}

/// Accepts on every socket until `quit` is signalled; `connected` gets the socket's number.
pub(crate) fn accept_all(sockets: &[&Socket], quit: &OwnedFd, mut connected: impl FnMut(usize, OwnedFd)) {
    let mut limit = LogLimit::new(Instant::now());
    loop {
        let listening = sockets.iter().map(|socket| PollFd::new(&socket.fd, PollFlags::IN));
        let mut fds: Vec<_> = listening.chain([PollFd::new(quit, PollFlags::IN)]).collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return error!("no further front-end can connect: {errno}"),
        }
        if fds.last().is_some_and(|quit| !quit.revents().is_empty()) {
            return;
        }
        let ready = fds.iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
        for number in ready.map(|(number, _)| number).collect::<Vec<_>>() {
            accept_one(sockets[number], &mut limit, |front_end| connected(number, front_end));
        }
    }
}

fn accept_one(socket: &Socket, limit: &mut LogLimit, connected: impl FnOnce(OwnedFd)) {
    match accept_with(&socket.fd, SocketFlags::CLOEXEC) {
        Ok(front_end) => connected(front_end),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
        Err(errno) => {
            if limit.allow(Instant::now()).is_some() {
                error!("front-end on {} not accepted: {errno}", socket.path.display());
            }
            std::thread::sleep(ACCEPT_PAUSE);
        }
    }
}
