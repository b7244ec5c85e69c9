//! Listening sockets that the service manager created before the server and passes to it (socket activation).
//!
//! `LISTEN_FDS → checked → assigned to disks, by path or by name → Opener that returns them`
//!
//! - The rest of the program notices no difference: binding a path whose socket was passed returns the passed socket. A
//!   disk that is removed and added again, or changed in the file, gets the same socket.
//! - Such a socket stays the manager's: the server never changes its file, owner or mode, and never removes it.
//!
//! Source: sd_listen_fds(3).

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use disk_image::{FileId, FileKind, LockHolder, OpenRequest, Opener, QueueAttributes};
use rustix::fs::fstat;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{SocketAddrUnix, SocketType, getsockname};
use tracing::{debug, info, warn};

use crate::config::configuration::Configuration;

/// The names of the control socket and the monitor socket, if their paths do not identify them.
const CONTROL: &str = "control";
const MONITOR: &str = "monitor";

/// One passed socket.
#[derive(Debug)]
pub struct PassedSocket {
    fd: OwnedFd,
    /// `FileDescriptorName=`.
    name: String,
    path: PathBuf,
}

impl PassedSocket {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Takes the passed sockets before anything else is opened or started. Only the first call returns them.
pub fn receive() -> Result<Vec<PassedSocket>> {
    let passed = sd_listen_fds::get().context("LISTEN_FDS, LISTEN_PID")?;
    let numbered = passed.into_iter().enumerate();
    let checked = numbered.map(|(index, (name, fd))| {
        let (number, name) = (index.saturating_add(3), name.unwrap_or_default());
        check(fd.into_std(), name.clone())
            .with_context(|| format!("descriptor {number} (`{name}`) from the service manager"))
    });
    checked.collect()
}

fn check(fd: OwnedFd, name: String) -> Result<PassedSocket> {
    fcntl_setfd(&fd, FdFlags::CLOEXEC).context("is not open")?;
    let listens = socket_type(&fd).is_ok_and(|kind| kind == SocketType::STREAM)
        && socket_acceptconn(&fd).is_ok_and(|listens| listens);
    let address = getsockname(&fd).ok().and_then(|address| SocketAddrUnix::try_from(address).ok());
    let path = address.as_ref().and_then(SocketAddrUnix::path_bytes);
    match path {
        Some(path) if listens => {
            let path = PathBuf::from(OsStr::from_bytes(path));
            Ok(PassedSocket { fd, name, path })
        }
        _ => {
            bail!("is not a listening unix stream socket with a path: use ListenStream=/PATH, and Accept=no")
        }
    }
}

/// Assigns each socket to the disk, control socket or monitor socket with the same path, else to the disk with its name.
/// Returns an opener that returns these sockets.
pub fn assign(
    passed: Vec<PassedSocket>,
    configuration: &Configuration,
    opener: &Arc<dyn Opener>,
) -> Arc<dyn Opener> {
    if passed.is_empty() {
        return Arc::clone(opener);
    }
    let disks = configuration.disks.iter().map(|disk| (disk.name(opener.as_ref()), &disk.socket.path));
    let options = &configuration.server.options;
    let control = options.control.iter().map(|path| (CONTROL.to_owned(), path));
    let monitor = options.monitor.iter().map(|path| (MONITOR.to_owned(), path));
    let wanted: Vec<_> = disks.chain(control).chain(monitor).collect();
    let real = |path: &Path| opener.canonical_path(path).unwrap_or_else(|_| path.to_owned());
    let mut sockets = HashMap::new();
    for PassedSocket { fd, name, path } in passed {
        let free = || wanted.iter().filter(|(_, wanted)| !sockets.contains_key(*wanted));
        let by_path = free().find(|(_, wanted)| **wanted == path || real(wanted) == real(&path));
        let Some((owner, wanted)) = by_path.or_else(|| free().find(|(owner, _)| *owner == name)) else {
            let path = path.display();
            warn!(
                "the service manager passes socket {path} (`{name}`), but no disk is served there, so \
                 clients that connect must wait; give a disk this socket or this name, or disable the socket \
                 unit"
            );
            continue;
        };
        info!(owner, socket = %wanted.display(), made_as = %path.display(), "socket taken from the service manager");
        sockets.insert((*wanted).clone(), fd);
    }
    Arc::new(PassedSockets { inner: Arc::clone(opener), sockets })
}

/// An opener that already has some sockets.
#[derive(Debug)]
struct PassedSockets {
    inner: Arc<dyn Opener>,
    /// The sockets, by their paths in the configuration.
    sockets: HashMap<PathBuf, OwnedFd>,
}

impl PassedSockets {
    fn has(&self, path: &Path) -> bool {
        self.sockets.contains_key(path)
    }
}

impl Opener for PassedSockets {
    /// A passed socket does not block its own path.
    fn file_kind(&self, path: &Path) -> io::Result<FileKind> {
        if self.has(path) { Err(io::ErrorKind::NotFound.into()) } else { self.inner.file_kind(path) }
    }

    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf> {
        self.inner.canonical_path(path)
    }

    fn file_id(&self, path: &Path) -> io::Result<FileId> {
        let Some(socket) = self.sockets.get(path) else { return self.inner.file_id(path) };
        let stat = fstat(socket)?;
        Ok(FileId { dev: stat.st_dev, ino: stat.st_ino })
    }

    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd> {
        self.inner.open_image(path, request)
    }

    fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        self.inner.reopen(file)
    }

    fn path_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<PathBuf>> {
        self.inner.path_of(file)
    }

    fn open_configuration(&self, path: &Path) -> io::Result<OwnedFd> {
        self.inner.open_configuration(path)
    }

    fn queue_attributes(&self, major: u32, minor: u32) -> io::Result<QueueAttributes> {
        self.inner.queue_attributes(major, minor)
    }

    fn lock_holders(&self, file: FileId) -> Vec<LockHolder> {
        self.inner.lock_holders(file)
    }

    fn bind_socket(&self, path: &Path) -> io::Result<OwnedFd> {
        match self.sockets.get(path) {
            Some(socket) => Ok(fcntl_dupfd_cloexec(socket.as_fd(), 0)?),
            None => self.inner.bind_socket(path),
        }
    }

    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        if self.has(path) {
            debug!("the service manager sets owner and mode of socket {}", path.display());
            return Ok(());
        }
        self.inner.set_socket_owner(path, mode, uid, gid)
    }

    fn connect_socket(&self, path: &Path) -> io::Result<()> {
        self.inner.connect_socket(path)
    }

    fn adopt_image(&self, path: &Path, file: BorrowedFd<'_>) -> io::Result<()> {
        self.inner.adopt_image(path, file)
    }

    fn adopt_socket(&self, path: &Path, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.inner.adopt_socket(path, socket)
    }

    fn comes_locked(&self, path: &Path) -> bool {
        self.inner.comes_locked(path)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        if self.has(path) { Ok(()) } else { self.inner.unlink(path) }
    }
}
