//! The helper's end: waits for requests, checks each against the policy, and carries it out.
//!
//! Each request uses a snapshot of the policy, so it looks at files without a lock. A file system that hangs delays
//! only the requests for its own files.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use disk_image::{Access, FileId, FileKind, HostOpener, OpenRequest, Opener};
use nbd_client::{Dial, HostDialer};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{SocketAddrUnix, getsockname};
use sandbox::{Identity, Kept};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tracing::{debug, error};

use super::accounts;
use super::credentials;
use super::messages::{self, Answer, Ask, kind_to_number, queue_to_numbers};
use super::policy::{Allowed, FileLocation, Found, MAX_CONFIGURATION_BYTES};
use super::process_records;

/// Maximum number of requests at a time: more than the number of server threads that send requests.
const MAX_REQUESTS: usize = 256;

/// An answer, with a descriptor if the request opened something.
type Reply = io::Result<(Answer, Option<OwnedFd>)>;

/// Serves the server that started this process, until that server ends.
pub fn run() -> Result<()> {
    // Signals to the process group, or to a whole unit, are for the server, which needs its helper in order to stop.
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))
            .context("cannot catch SIGHUP, SIGINT and SIGTERM")?;
    }
    let channel = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("the sandbox's helper was started without a server")?;
    let _ = rustix::thread::set_name(c"bareblk-helper");
    sandbox::keep_out_of_core_files()?;
    sandbox::drop_privileges(Identity::default(), Kept::Files)?;
    let state = Arc::<State>::default();
    while let Some((ask, fds)) =
        messages::receive::<Ask>(&channel).context("cannot receive from the server")?
    {
        let mut fds = fds.into_iter();
        let Some(back) = fds.next() else { continue };
        begin(&state, ask, fds.next(), back);
    }
    Ok(())
}

#[derive(Debug, Default)]
struct State {
    allowed: Mutex<Arc<Allowed>>,
    running: AtomicUsize,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Arc<Allowed>> {
        self.allowed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A snapshot of the policy. A check against it may have to wait for a file system.
    fn allowed(&self) -> Arc<Allowed> {
        Arc::clone(&self.lock())
    }

    /// `change` must not access files.
    fn change<T>(&self, change: impl FnOnce(&mut Allowed) -> T) -> T {
        change(Arc::make_mut(&mut self.lock()))
    }
}

/// Answers on another thread, because a file system may hang.
fn begin(state: &Arc<State>, ask: Ask, file: Option<OwnedFd>, back: OwnedFd) {
    // Relaxed: the number orders no other data.
    if state.running.fetch_add(1, Ordering::Relaxed) >= MAX_REQUESTS {
        state.running.fetch_sub(1, Ordering::Relaxed);
        return reply(Err(Errno::AGAIN.into()), back);
    }
    let own = Arc::clone(state);
    let thread = std::thread::Builder::new().name("bareblk-opener".into()).spawn(move || {
        let result = own.carry_out(ask, file);
        own.running.fetch_sub(1, Ordering::Relaxed);
        reply(result, back);
    });
    if let Err(error) = thread {
        // The server sees that its socket is closed.
        state.running.fetch_sub(1, Ordering::Relaxed);
        error!("the sandbox's helper cannot start a thread: {error}");
    }
}

/// Sends the answer, then closes what was opened, and last the socket: this tells the server that the helper keeps
/// nothing open.
fn reply(result: Reply, back: OwnedFd) {
    let (answer, opened) = result.unwrap_or_else(|error| (Answer::Failed(error.into()), None));
    let fds: Vec<_> = opened.iter().map(AsFd::as_fd).collect();
    if let Err(error) = messages::send(&back, &answer, &fds) {
        debug!("the server did not receive an answer of the sandbox's helper: {error}");
    }
    drop(opened);
    drop(back);
}

fn opened(fd: OwnedFd) -> (Answer, Option<OwnedFd>) {
    (Answer::Opened, Some(fd))
}

fn said(answer: Answer) -> (Answer, Option<OwnedFd>) {
    (answer, None)
}

impl State {
    fn carry_out(&self, ask: Ask, file: Option<OwnedFd>) -> Reply {
        let host = HostOpener;
        match ask {
            Ask::Allow(policy) => {
                let policy = policy.resolved();
                self.change(|allowed| allowed.extend(policy)).map(|()| said(Answer::Done))
            }
            Ask::FileKind { path } => {
                host.file_kind(path.as_ref()).map(|kind| said(Answer::Kind(kind_to_number(kind))))
            }
            Ask::CanonicalPath { path } => {
                host.canonical_path(path.as_ref()).map(|path| said(Answer::Path(path.into())))
            }
            Ask::FileId { path } => {
                let FileId { dev, ino } = host.file_id(path.as_ref())?;
                Ok(said(Answer::FileId { dev, ino }))
            }
            Ask::OpenImage { path, writable, direct, create, exclusive } => {
                let access = if writable { Access::ReadWrite } else { Access::ReadOnly };
                self.open_image(path.as_ref(), &OpenRequest { access, direct, create, exclusive })
            }
            Ask::Reopen => {
                let file = file.ok_or(io::ErrorKind::InvalidInput)?;
                // Reopening an O_PATH descriptor would turn a name into the right to read.
                if rustix::fs::fcntl_getfl(&file)?.contains(OFlags::PATH) {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                self.allowed().reopen(file_id(&file)?)?;
                host.reopen(file.as_fd()).map(opened)
            }
            Ask::AdoptImage { path } => {
                let file = file.ok_or(io::ErrorKind::InvalidInput)?;
                self.adopt_image(path.as_ref(), &file)
            }
            Ask::AdoptSocket { path } => {
                let socket = file.ok_or(io::ErrorKind::InvalidInput)?;
                self.allowed().adopt_socket(path.as_ref())?;
                let file = adopted_socket(path.as_ref(), &socket)?;
                self.change(|allowed| allowed.bound(path.as_ref(), file));
                Ok(said(Answer::Done))
            }
            Ask::OpenConfiguration { path } => self.open_configuration(path.as_ref()),
            Ask::QueueAttributes { major, minor } => {
                let queue = host.queue_attributes(major, minor)?;
                Ok(said(Answer::Queue(queue_to_numbers(&queue))))
            }
            Ask::LockHolders { dev, ino } => {
                let holders = host.lock_holders(FileId { dev, ino });
                let holders = holders.into_iter().map(|holder| (holder.pid, holder.command)).collect();
                Ok(said(Answer::Holders(holders)))
            }
            Ask::ProcessStart { pid } => {
                process_records::start_of(pid).map(|start| said(Answer::Start(start)))
            }
            Ask::UserId { name } => id(accounts::user_id(&name)),
            Ask::GroupId { name } => id(accounts::group_id(&name)),
            socket => self.about_sockets(socket),
        }
    }

    fn about_sockets(&self, ask: Ask) -> Reply {
        let host = HostOpener;
        let allowed = |path: &OsString| self.allowed().socket(path.as_ref()).map(|()| PathBuf::from(path));
        match ask {
            Ask::BindSocket { path } => {
                let path = allowed(&path)?;
                let socket = host.bind_socket(&path)?;
                let file = host.file_id(&path)?;
                self.change(|allowed| allowed.bound(&path, file));
                Ok(opened(socket))
            }
            Ask::ConnectSocket { path } => host.connect_socket(&allowed(&path)?).map(|()| said(Answer::Done)),
            Ask::SetSocketOwner { path, mode, uid, gid } => {
                let path = allowed(&path)?;
                let file = host.file_id(&path)?;
                self.allowed().own_socket(&path, file)?;
                host.set_socket_owner(&path, mode, uid, gid).map(|()| said(Answer::Done))
            }
            Ask::Dial { server, timeout_ms } => {
                self.allowed().server(&server)?;
                HostDialer.dial(&server.into(), Duration::from_millis(timeout_ms)).map(opened)
            }
            Ask::OpenCredentials { path } => {
                self.allowed().credentials(path.as_ref())?;
                credentials::open(path.as_ref()).map(opened)
            }
            Ask::Unlink { path } => {
                let path: &Path = path.as_ref();
                let made = self.change(|allowed| allowed.forget_made(path));
                // If another process has replaced the file meanwhile, only a socket may be removed.
                if made.is_none() || made != Some(host.file_id(path)?) {
                    let file = self.allowed().unlink(path)?;
                    self.change(|allowed| allowed.forget_bound(file));
                }
                host.unlink(path).map(|()| said(Answer::Done))
            }
            other => {
                Err(io::Error::other(format!("the sandbox's helper does not know the request {other:?}")))
            }
        }
    }

    fn open_image(&self, path: &Path, request: &OpenRequest) -> Reply {
        let written = request.access == Access::ReadWrite || request.create.is_some();
        let found = self.allowed().image(path, written)?;
        let image = match (found, request.create) {
            (Found::Beside, None) => self.open_beside(path, request, written)?,
            _ => HostOpener.open_image(path, request)?,
        };
        accept_kind(&image)?;
        let location = FileLocation::of(&image)?;
        if found == Found::Beside && request.create.is_some() {
            self.check_made(path, &location)?;
        }
        self.change(|allowed| {
            if request.create.is_some() {
                allowed.made(path, &location);
            }
            allowed.opened(path, location);
        });
        Ok(opened(image))
    }

    /// Checks an image that was created: another process may have changed links in its path after the first check.
    fn check_made(&self, path: &Path, location: &FileLocation) -> io::Result<()> {
        let allowed = self.allowed().image_beside(path, location, true);
        if allowed.is_err() {
            let _ = std::fs::remove_file(&location.real);
        }
        allowed
    }

    /// Allows an image to be reopened, if `path` names it and the policy allows `path` to be opened in this mode.
    fn adopt_image(&self, path: &Path, file: &OwnedFd) -> Reply {
        self.allowed().adopts()?;
        let flags = rustix::fs::fcntl_getfl(file)?;
        if flags.contains(OFlags::PATH) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let written = flags & OFlags::RWMODE != OFlags::RDONLY;
        accept_kind(file)?;
        let location = FileLocation::of(file)?;
        if self.allowed().image(path, written)? == Found::Beside {
            self.allowed().image_beside(path, &location, written)?;
        }
        if FileId::from(&std::fs::metadata(path)?) != location.file {
            let text = format!("{} is not the file that the running server serves", path.display());
            return Err(io::Error::other(text));
        }
        self.change(|allowed| allowed.opened(path, location));
        Ok(said(Answer::Done))
    }

    /// Checks the file before it opens it, because opening a device that is not a disk may act on the device. It opens
    /// exactly the file that it checked, even if another process changes links meanwhile.
    fn open_beside(&self, path: &Path, request: &OpenRequest, written: bool) -> io::Result<OwnedFd> {
        let pinned = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        accept_kind(&pinned)?;
        self.allowed().image_beside(path, &FileLocation::of(&pinned)?, written)?;
        let link = PathBuf::from(format!("/proc/self/fd/{}", pinned.as_raw_fd()));
        HostOpener.open_image(&link, request)
    }

    /// Reads the configuration file, and allows the images and sockets that it names now.
    fn open_configuration(&self, path: &Path) -> Reply {
        self.allowed().configuration(path)?;
        let mut text = String::new();
        let read = File::open(path)?.take(MAX_CONFIGURATION_BYTES).read_to_string(&mut text);
        if read.is_ok() {
            let folders = Allowed::backing_folders_in(&text);
            self.change(|allowed| {
                allowed.extend_from_file(&text);
                allowed.extend_backing_folders(folders);
            });
        }
        HostOpener.open_configuration(path).map(opened)
    }
}

/// The file of a listening socket, which must have been created at `path`.
fn adopted_socket(path: &Path, socket: &OwnedFd) -> io::Result<FileId> {
    let address = SocketAddrUnix::try_from(getsockname(socket)?)?;
    let made_as = PathBuf::from(OsStr::from_bytes(address.path_bytes().unwrap_or_default()));
    let place = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok::<_, io::Error>((std::fs::canonicalize(folder)?, path.file_name().map(OsStr::to_owned)))
    };
    if !socket_acceptconn(socket)? || place(&made_as)? != place(path)? {
        let (path, made_as) = (path.display(), made_as.display());
        return Err(io::Error::other(format!("the socket for {path} was created as {made_as}")));
    }
    HostOpener.file_id(path)
}

fn accept_kind(file: &OwnedFd) -> io::Result<()> {
    match File::from(file.try_clone()?).metadata()?.file_type().into() {
        FileKind::Regular | FileKind::BlockDevice => Ok(()),
        kind => Err(io::Error::other(format!("not an image but a {kind}"))),
    }
}

fn file_id(file: &OwnedFd) -> io::Result<FileId> {
    Ok(FileId::from(&File::from(file.try_clone()?).metadata()?))
}

fn id(found: Result<u32>) -> Reply {
    found.map(|id| said(Answer::Id(id))).map_err(|error| io::Error::other(format!("{error:#}")))
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
