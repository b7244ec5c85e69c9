//! Sockets: their files made, kept private, and removed.
//!
//! - A socket file left by a dead server is replaced; one that answers is refused.
//!
//! Not here: who waits for connections (`acceptor.rs`), what a front-end says (`session`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use disk_image::{FileId, FileKind, Opener};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tracing::warn;

/// Bytes of a socket path, without its terminating zero (`sockaddr_un`).
const MAX_PATH_BYTES: usize = 107;
/// From a server's `bind` to its `listen`, with room to spare.
const STARTING_SERVER: std::time::Duration = std::time::Duration::from_millis(100);

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

impl SocketConfig {
    /// Whether a socket could be made there: what can be said before anything is opened or made.
    ///
    /// # Errors
    /// [`SocketError`]: the path is too long, or its folder does not exist.
    pub fn check(&self, opener: &dyn Opener) -> Result<(), SocketError> {
        check_path(opener, &self.path)
    }
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

/// For a listening socket whose closing does not hang.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// A bound socket, removed when dropped. Accepting from it never blocks.
#[derive(Debug)]
pub struct Socket {
    /// `None` only while it is dropped.
    fd: Option<OwnedFd>,
    path: PathBuf,
    /// The socket file that `bind` made.
    file: FileId,
    opener: Arc<dyn Opener>,
    removed: AtomicBool,
}

impl Socket {
    /// Makes it and listens; a socket file that a dead server left is replaced.
    ///
    /// # Errors
    /// [`SocketError`]; nothing stays behind then.
    pub fn bind(opener: &Arc<dyn Opener>, config: &SocketConfig) -> Result<Self, SocketError> {
        let path = &config.path;
        let failed = |action| move |source: io::Error| SocketError::Io { action, path: path.clone(), source };
        check_path(opener.as_ref(), path)?;
        clear_stale(opener.as_ref(), &[path])?;
        let fd = opener.bind_socket(path).map_err(failed("bind"))?;
        let file = opener.file_id(path).map_err(failed("look at"))?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(|errno| failed("set up")(errno.into()))?;
        let socket = Self {
            fd: Some(fd),
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

    /// Whether its file is somebody else's to change and to remove: a service manager's.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        rustix::fs::fstat(self).is_ok_and(|stat| self.file == FileId { dev: stat.st_dev, ino: stat.st_ino })
    }

    /// Whether its file stays when it goes: another process listens on it.
    pub fn leave_file(&self, stays: bool) {
        self.removed.store(stays, Ordering::Relaxed);
    }

    /// The next front-end that connected, if there is one.
    ///
    /// # Errors
    /// Out of descriptors or memory.
    pub(crate) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match accept_with(self, SocketFlags::CLOEXEC) {
            Ok(front_end) => {
                take_urgent_bytes_in_line(&front_end);
                Ok(Some(front_end))
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Removes the socket file, once: nobody connects any more, and the path is free for another server.
    pub fn remove(&self) {
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

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let Some(fd) = &self.fd else { unreachable!("a socket has its descriptor until it is dropped") };
        fd.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove();
        if let Some(fd) = self.fd.take() {
            close_with_backlog(fd);
        }
    }
}

/// Closes a listening socket. Front-ends that were never accepted may have sent descriptors, which are closed with it, if no
/// other process listens on it too, and may hang: another thread closes it, and this one waits for a moment only.
fn close_with_backlog(listener: OwnedFd) {
    let (closed, is_closed) = sync_channel(1);
    let close = move || {
        drop(listener);
        let _ = closed.send(());
    };
    let thread = std::thread::Builder::new().name("bareblk-close".into()).stack_size(64 << 10);
    match thread.spawn(close) {
        // Usually at once; then the path can be bound again.
        Ok(_) => drop(is_closed.recv_timeout(CLOSED_WITHIN)),
        Err(error) => warn!("a socket was closed without a thread of its own: {error}"),
    }
}

/// A byte sent with MSG_OOB, and the descriptors that came with it, are received like any other. By default the kernel leaves
/// them out of line: `recv` then closes the descriptors itself, which may wait, and a look at the socket does not see them.
pub(crate) fn take_urgent_bytes_in_line(socket: &OwnedFd) {
    // Fails on a kernel that knows no urgent bytes of Unix sockets: then there are none.
    let _ = rustix::net::sockopt::set_socket_oobinline(socket, true);
}

fn check_path(opener: &dyn Opener, path: &Path) -> Result<(), SocketError> {
    let bytes = path.as_os_str().len();
    if bytes > MAX_PATH_BYTES {
        return Err(SocketError::PathTooLong { path: path.to_owned(), bytes, max: MAX_PATH_BYTES });
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder.map(|folder| opener.file_kind(folder)) {
        None | Some(Ok(_)) => Ok(()),
        Some(Err(error))
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            Err(SocketError::NoFolder { path: path.to_owned() })
        }
        Some(Err(source)) => {
            Err(SocketError::Io { action: "look at the folder of", path: path.to_owned(), source })
        }
    }
}

/// Socket files that nobody answers on any more go; anything else stays and is an error.
pub(crate) fn clear_stale(opener: &dyn Opener, paths: &[&Path]) -> Result<(), SocketError> {
    let mut stale = Vec::new();
    for &path in paths {
        let failed = |action, source| SocketError::Io { action, path: path.to_owned(), source };
        match opener.file_kind(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("look at", error)),
            Ok(FileKind::Socket) => {
                refuse_alive(opener, path)?;
                stale.push(path);
            }
            Ok(kind) => return Err(SocketError::NotASocket { path: path.to_owned(), kind }),
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    // Asked twice: a server that is just starting has made the file and does not listen yet.
    std::thread::sleep(STARTING_SERVER);
    stale.into_iter().try_for_each(|path| {
        refuse_alive(opener, path)?;
        let failed = |source| SocketError::Io { action: "remove stale", path: path.to_owned(), source };
        opener.unlink(path).map_err(failed)
    })
}

fn refuse_alive(opener: &dyn Opener, path: &Path) -> Result<(), SocketError> {
    match is_dead(opener, path) {
        Ok(true) => Ok(()),
        Ok(false) => Err(SocketError::InUse { path: path.to_owned() }),
        Err(source) => Err(SocketError::Io { action: "look who listens on", path: path.to_owned(), source }),
    }
}

fn is_dead(opener: &dyn Opener, path: &Path) -> io::Result<bool> {
    match opener.connect_socket(path) {
        Ok(()) => Ok(false),
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => Ok(true),
            io::ErrorKind::WouldBlock => Ok(false), // alive, with a full queue of connections
            _ => Err(error),
        },
    }
}
