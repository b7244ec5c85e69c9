//! An opener for a server that takes over: returns the old server's open images and sockets, and opens everything else.
//!
//! `path of an image or socket that was handed over → that descriptor, once; everything else → the usual opener`
//!
//! - Until [`HandedOver::commit`] it does not affect the old server: it removes no socket file and changes no owner.
//! - A service manager's socket stays the service manager's (`passed_sockets.rs`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use disk_image::host_opener::LISTEN_BACKLOG;
use disk_image::{Access, FileId, FileKind, LockHolder, OpenRequest, Opener, QueueAttributes};
use rustix::fs::{OFlags, fcntl_getfl, fstat};
use rustix::io::fcntl_dupfd_cloexec;
use tracing::{debug, warn};

/// An image that the old server has open.
#[derive(Debug)]
pub struct Image {
    /// The path in the new server's configuration.
    pub path: PathBuf,
    pub file: OwnedFd,
    pub claim: Option<OwnedFd>,
}

/// A socket on which the old server listens.
#[derive(Debug)]
pub struct Socket {
    pub fd: OwnedFd,
    pub managed: bool,
    /// Whether the new server has taken it.
    taken: bool,
}

impl Socket {
    pub fn new(fd: OwnedFd, managed: bool) -> Self {
        Self { fd, managed, taken: false }
    }

    /// Whether this opener still returns the socket instead of creating one.
    fn is_there(&self) -> bool {
        self.managed || !self.taken
    }
}

/// Mode, user and group for a socket's file.
type Owner = (u32, Option<u32>, Option<u32>);

#[derive(Debug)]
struct State {
    files: Vec<(PathBuf, OwnedFd)>,
    claims: Vec<(PathBuf, OwnedFd)>,
    /// The image opened last, if it was handed over with its lock.
    locked: Option<PathBuf>,
    /// The sockets, by their paths in the new server's configuration.
    sockets: HashMap<PathBuf, Socket>,
    owners: Vec<(PathBuf, Owner)>,
    committed: bool,
}

/// An opener that knows what the old server has handed over.
#[derive(Debug)]
pub struct HandedOver {
    inner: Arc<dyn Opener>,
    state: Mutex<State>,
}

impl HandedOver {
    pub fn new(inner: &Arc<dyn Opener>, images: Vec<Image>, sockets: HashMap<PathBuf, Socket>) -> Arc<Self> {
        let (mut files, mut claims) = (Vec::new(), Vec::new());
        for Image { path, file, claim } in images {
            claims.extend(claim.map(|claim| (path.clone(), claim)));
            files.push((path, file));
        }
        let state = State { files, claims, locked: None, sockets, owners: Vec::new(), committed: false };
        Arc::new(Self { inner: Arc::clone(inner), state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called when the old server has given up: gives the sockets their configured owners, and makes the kernel
    /// tell front-ends that this process listens.
    pub fn commit(&self) {
        let mut state = self.state();
        state.committed = true;
        for socket in state.sockets.values().filter(|socket| socket.taken) {
            if let Err(errno) = rustix::net::listen(&socket.fd, LISTEN_BACKLOG) {
                debug!("front-ends still see the old server's process id: {errno}");
            }
        }
        let owners = std::mem::take(&mut state.owners);
        // The other sockets end with their disks.
        state.sockets.retain(|_, socket| socket.managed);
        drop(state);
        for (path, (mode, uid, gid)) in owners {
            if let Err(error) = self.inner.set_socket_owner(&path, mode, uid, gid) {
                warn!("cannot change owner and mode of socket {}: {error}", path.display());
            }
        }
    }

    fn has_socket(&self, path: &Path) -> bool {
        self.state().sockets.get(path).is_some_and(Socket::is_there)
    }

    fn is_managed(&self, path: &Path) -> bool {
        self.state().sockets.get(path).is_some_and(|socket| socket.managed)
    }
}

/// Whether the file was opened in the requested way.
fn is_as_asked(file: &OwnedFd, request: &OpenRequest) -> bool {
    let mode = if request.access == Access::ReadWrite { OFlags::RDWR } else { OFlags::RDONLY };
    fcntl_getfl(file)
        .is_ok_and(|flags| flags & OFlags::RWMODE == mode && flags.contains(OFlags::DIRECT) == request.direct)
}

impl Opener for HandedOver {
    /// An inherited socket does not block its own path.
    fn file_kind(&self, path: &Path) -> io::Result<FileKind> {
        if self.has_socket(path) { Err(io::ErrorKind::NotFound.into()) } else { self.inner.file_kind(path) }
    }

    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf> {
        self.inner.canonical_path(path)
    }

    fn file_id(&self, path: &Path) -> io::Result<FileId> {
        if let Some(socket) = self.state().sockets.get(path).filter(|socket| socket.managed) {
            let stat = fstat(&socket.fd)?;
            return Ok(FileId { dev: stat.st_dev, ino: stat.st_ino });
        }
        self.inner.file_id(path)
    }

    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd> {
        let mut state = self.state();
        if request.exclusive {
            let claim = state.claims.iter().position(|(claimed, _)| claimed == path);
            if let Some(at) = claim {
                return Ok(state.claims.remove(at).1);
            }
        }
        let is_it = |(known, file): &(PathBuf, OwnedFd)| known == path && is_as_asked(file, request);
        let handed =
            state.files.iter().position(is_it).filter(|_| !request.exclusive && request.create.is_none());
        let Some(at) = handed else {
            drop(state);
            return self.inner.open_image(path, request);
        };
        let (path, file) = state.files.remove(at);
        self.inner.adopt_image(&path, file.as_fd())?;
        state.locked = Some(path);
        Ok(file)
    }

    fn comes_locked(&self, path: &Path) -> bool {
        self.state().locked.take_if(|locked| locked == path).is_some()
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
        let mut state = self.state();
        let Some(socket) = state.sockets.get_mut(path).filter(|socket| socket.is_there()) else {
            drop(state);
            return self.inner.bind_socket(path);
        };
        if !socket.managed {
            self.inner.adopt_socket(path, socket.fd.as_fd())?;
        }
        socket.taken = true;
        Ok(fcntl_dupfd_cloexec(&socket.fd, 0)?)
    }

    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        if self.is_managed(path) {
            debug!("the service manager sets owner and mode of socket {}", path.display());
            return Ok(());
        }
        let mut state = self.state();
        if !state.committed && state.sockets.contains_key(path) {
            state.owners.push((path.to_owned(), (mode, uid, gid)));
            return Ok(());
        }
        drop(state);
        self.inner.set_socket_owner(path, mode, uid, gid)
    }

    fn connect_socket(&self, path: &Path) -> io::Result<()> {
        self.inner.connect_socket(path)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        let state = self.state();
        let is_theirs = state.sockets.get(path).is_some_and(|socket| socket.managed || !state.committed);
        drop(state);
        if is_theirs { Ok(()) } else { self.inner.unlink(path) }
    }
}
