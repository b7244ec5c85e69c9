//! Listening sockets: creates their files, restricts access to them, and removes them.
//!
//! The socket file of a dead server is replaced. A path on which a server answers is refused.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use disk_image::{FileId, FileKind, MAX_SOCKET_PATH_BYTES, Opener};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tracing::warn;

/// Time given to a server that is between `bind` and `listen`; longer than it needs.
const STARTING_SERVER: std::time::Duration = std::time::Duration::from_millis(100);

/// A disk's socket path, and which users may connect.
#[derive(Clone, Debug)]
pub struct SocketConfig {
    /// The socket file; at most [`MAX_SOCKET_PATH_BYTES`] long.
    pub path: PathBuf,
    /// Permission bits.
    pub mode: u32,
    /// Owner, if not the server's user.
    pub uid: Option<u32>,
    /// Group, if not the server's group.
    pub gid: Option<u32>,
}

impl SocketConfig {
    /// Checks whether a socket can be created at the path, without creating anything.
    ///
    /// # Errors
    /// [`SocketError`]: the path is too long, or its directory does not exist.
    pub fn check(&self, opener: &dyn Opener) -> Result<(), SocketError> {
        check_path(opener, &self.path)
    }
}

/// Why a socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path does not fit into `sockaddr_un`.
    #[error("socket path {} has {bytes} bytes, but at most {max} are allowed: use a shorter path", path.display())]
    PathTooLong {
        /** The socket's path. */
        path: PathBuf,
        /** Length of the path. */
        bytes: usize,
        /** The limit. */
        max: usize,
    },
    /// The directory does not exist.
    #[error("the folder of socket {} does not exist: create it first", path.display())]
    NoFolder {
        /** The socket's path. */
        path: PathBuf,
    },
    /// A server listens on the path.
    #[error("socket {} is in use by a running server: stop that server, or choose another path", path.display())]
    InUse {
        /** The socket's path. */
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("{} exists and is a {kind}, not a socket: choose another path", path.display())]
    NotASocket {
        /** The socket's path. */
        path: PathBuf,
        /** The kind of the existing file. */
        kind: FileKind,
    },
    /// A system call failed.
    #[error("cannot {action} socket {}", path.display())]
    Io {
        /** The attempted action. */
        action: &'static str,
        /** The socket's path. */
        path: PathBuf,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
}

/// How long to wait until a listening socket is closed.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// A bound socket, removed when dropped. `accept` never blocks.
#[derive(Debug)]
pub struct Socket {
    /// `None` only during drop.
    fd: Option<OwnedFd>,
    path: PathBuf,
    /// The socket file that `bind` created.
    file: FileId,
    opener: Arc<dyn Opener>,
    removed: AtomicBool,
}

impl Socket {
    /// Creates the socket and listens. Replaces the socket file of a dead server.
    ///
    /// # Errors
    /// [`SocketError`]; then no socket file is left.
    pub fn bind(opener: &Arc<dyn Opener>, config: &SocketConfig) -> Result<Self, SocketError> {
        let path = &config.path;
        let failed = |action| move |source: io::Error| SocketError::Io { action, path: path.clone(), source };
        check_path(opener.as_ref(), path)?;
        clear_stale(opener.as_ref(), &[path])?;
        let fd = opener.bind_socket(path).map_err(failed("bind"))?;
        let file = opener.file_id(path).map_err(failed("inspect"))?;
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

    /// Whether a service manager owns the socket file, so that this server neither changes nor removes it.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        rustix::fs::fstat(self).is_ok_and(|stat| self.file == FileId { dev: stat.st_dev, ino: stat.st_ino })
    }

    /// Sets whether the socket file stays when this value is dropped, because another process listens on it.
    pub fn leave_file(&self, stays: bool) {
        self.removed.store(stays, Ordering::Relaxed);
    }

    /// Accepts the next waiting front-end, if any.
    ///
    /// # Errors
    /// The process has no free descriptors or memory.
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

    /// Removes the socket file, once. No front-end can connect any more, and another server can use the path.
    pub fn remove(&self) {
        if self.removed.swap(true, Ordering::Relaxed) {
            return;
        }
        // Another server may have replaced the file with its own.
        if self.opener.file_id(&self.path).is_ok_and(|file| file != self.file) {
            return;
        }
        if let Err(error) = self.opener.unlink(&self.path) {
            warn!("cannot remove socket {}: {error}", self.path.display());
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

/// Closes a listening socket on another thread, and waits only briefly. Front-ends that were never accepted may have
/// sent descriptors; closing the socket also closes these, which may hang.
fn close_with_backlog(listener: OwnedFd) {
    let (closed, is_closed) = sync_channel(1);
    let close = move || {
        drop(listener);
        let _ = closed.send(());
    };
    let thread = std::thread::Builder::new().name("bareblk-close".into()).stack_size(64 << 10);
    match thread.spawn(close) {
        // Closing usually ends at once, and then the path can be bound again.
        Ok(_) => drop(is_closed.recv_timeout(CLOSED_WITHIN)),
        Err(error) => warn!("cannot start a thread that closes a socket, so this thread closes it: {error}"),
    }
}

/// Makes the kernel deliver MSG_OOB bytes and their descriptors like any others. By default it keeps them out of line:
/// `recv` closes their descriptors, which may wait, and a peek at the socket does not show them.
pub(crate) fn take_urgent_bytes_in_line(socket: &OwnedFd) {
    // Fails on kernels without urgent bytes for Unix sockets, which need no such setting.
    let _ = rustix::net::sockopt::set_socket_oobinline(socket, true);
}

fn check_path(opener: &dyn Opener, path: &Path) -> Result<(), SocketError> {
    let bytes = path.as_os_str().len();
    if bytes > MAX_SOCKET_PATH_BYTES {
        return Err(SocketError::PathTooLong { path: path.to_owned(), bytes, max: MAX_SOCKET_PATH_BYTES });
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
            Err(SocketError::Io { action: "find the folder of", path: path.to_owned(), source })
        }
    }
}

/// Removes socket files of dead servers. Any other file stays and is an error.
pub(crate) fn clear_stale(opener: &dyn Opener, paths: &[&Path]) -> Result<(), SocketError> {
    let mut stale = Vec::new();
    for &path in paths {
        let failed = |action, source| SocketError::Io { action, path: path.to_owned(), source };
        match opener.file_kind(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("inspect", error)),
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
    // Checks twice, because a server that is starting may have created the file but not called `listen` yet.
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
        Err(source) => Err(SocketError::Io {
            action: "check for a server that listens on",
            path: path.to_owned(),
            source,
        }),
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
