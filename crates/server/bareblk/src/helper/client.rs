//! The server's end: an [`Opener`] that passes every operation to the helper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use disk_image::host_opener::LISTEN_BACKLOG;
use disk_image::{Access, FileId, FileKind, LockHolder, OpenRequest, Opener, QueueAttributes};
use nbd_client::Address;

use super::messages::{self, Answer, Ask, kind_of_number, queue_of_numbers};
use super::policy::Policy;
use crate::logging::{LogArgs, LogFormat};

/// The hidden command that runs the helper.
pub const SUBCOMMAND: &str = "sandbox-helper";
/// Maximum number of paths in one message of the policy.
const PATHS_AT_A_TIME: usize = 4;

/// The connection to the helper.
#[derive(Debug)]
pub struct Helper {
    channel: OwnedFd,
}

static HELPER: OnceLock<Arc<Helper>> = OnceLock::new();

/// This process's helper, once it has started.
pub fn client() -> Option<&'static Arc<Helper>> {
    HELPER.get()
}

/// Starts the helper, with this process's current rights.
pub fn start(policy: &Policy, log: &LogArgs) -> Result<Arc<Helper>> {
    let (channel, theirs) = messages::pair().context("cannot create the socket for the sandbox's helper")?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("bareblk").arg(SUBCOMMAND).stdin(Stdio::from(theirs)).stdout(Stdio::null());
    command.args((0..log.verbose).map(|_| "-v"));
    if log.log_format == LogFormat::Json {
        command.args(["--log-format", "json"]);
    }
    // The server does not wait for the helper, which ends with the server or after it.
    command.spawn().context("cannot start the sandbox's helper (--sandbox off serves without it)")?;
    let helper = Arc::new(Helper { channel });
    helper.allow(policy).context("the sandbox's helper does not answer")?;
    let _ = HELPER.set(Arc::clone(&helper));
    Ok(helper)
}

impl Helper {
    fn allow(&self, policy: &Policy) -> io::Result<()> {
        policy.pieces(PATHS_AT_A_TIME).into_iter().try_for_each(|piece| self.done(&Ask::Allow(piece)))
    }

    /// Sends the request, with `file`. Waits for the answer, and until the helper has closed its copies of the answer's
    /// descriptors.
    fn ask(&self, ask: &Ask, file: Option<BorrowedFd<'_>>) -> io::Result<(Answer, Option<OwnedFd>)> {
        let gone = || {
            io::Error::other(
                "the sandbox's helper has ended: nothing can be opened until the server is restarted",
            )
        };
        let (ours, theirs) = messages::pair()?;
        let fds: Vec<BorrowedFd<'_>> = [theirs.as_fd()].into_iter().chain(file).collect();
        messages::send(&self.channel, ask, &fds).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => gone(),
            _ => error,
        })?;
        drop(theirs);
        let (answer, mut fds) = messages::receive(&ours)?.ok_or_else(gone)?;
        messages::wait_closed(&ours)?;
        match answer {
            Answer::Failed(failure) => Err(failure.into()),
            answer => Ok((answer, fds.pop())),
        }
    }

    fn done(&self, ask: &Ask) -> io::Result<()> {
        self.ask(ask, None).map(drop)
    }

    fn opened(&self, ask: &Ask, file: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
        self.ask(ask, file)?.1.ok_or_else(unexpected)
    }

    /// The id of the user with this name.
    pub fn user_id(&self, name: &str) -> io::Result<u32> {
        self.id(&Ask::UserId { name: name.to_owned() })
    }

    /// The id of the group with this name.
    pub fn group_id(&self, name: &str) -> io::Result<u32> {
        self.id(&Ask::GroupId { name: name.to_owned() })
    }

    fn id(&self, ask: &Ask) -> io::Result<u32> {
        match self.ask(ask, None)?.0 {
            Answer::Id(id) => Ok(id),
            _ => Err(unexpected()),
        }
    }
}

fn unexpected() -> io::Error {
    io::Error::other("the answer of the sandbox's helper does not fit the request")
}

impl Helper {
    /// Connects to an NBD server.
    pub fn dial(&self, address: &Address, timeout: Duration) -> io::Result<OwnedFd> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.opened(&Ask::Dial { server: address.into(), timeout_ms }, None)
    }

    /// When a process started, in clock ticks since the boot; `None`: there is no such process.
    pub fn process_start(&self, pid: u32) -> io::Result<Option<u64>> {
        match self.ask(&Ask::ProcessStart { pid }, None)?.0 {
            Answer::Start(start) => Ok(start),
            _ => Err(unexpected()),
        }
    }

    /// Opens a file with credentials for an NBD server.
    pub fn open_credentials(&self, path: &Path) -> io::Result<OwnedFd> {
        self.opened(&Ask::OpenCredentials { path: path.into() }, None)
    }
}

impl Opener for Helper {
    fn file_kind(&self, path: &Path) -> io::Result<FileKind> {
        match self.ask(&Ask::FileKind { path: path.into() }, None)?.0 {
            Answer::Kind(kind) => Ok(kind_of_number(kind)),
            _ => Err(unexpected()),
        }
    }

    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf> {
        match self.ask(&Ask::CanonicalPath { path: path.into() }, None)?.0 {
            Answer::Path(path) => Ok(path.into()),
            _ => Err(unexpected()),
        }
    }

    fn file_id(&self, path: &Path) -> io::Result<FileId> {
        match self.ask(&Ask::FileId { path: path.into() }, None)?.0 {
            Answer::FileId { dev, ino } => Ok(FileId { dev, ino }),
            _ => Err(unexpected()),
        }
    }

    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd> {
        let OpenRequest { access, direct, create, exclusive } = *request;
        let writable = access == Access::ReadWrite;
        self.opened(&Ask::OpenImage { path: path.into(), writable, direct, create, exclusive }, None)
    }

    fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        self.opened(&Ask::Reopen, Some(file))
    }

    fn path_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<PathBuf>> {
        let _ = file;
        Ok(None)
    }

    fn open_configuration(&self, path: &Path) -> io::Result<OwnedFd> {
        self.opened(&Ask::OpenConfiguration { path: path.into() }, None)
    }

    fn queue_attributes(&self, major: u32, minor: u32) -> io::Result<QueueAttributes> {
        match self.ask(&Ask::QueueAttributes { major, minor }, None)?.0 {
            Answer::Queue(numbers) => Ok(queue_of_numbers(numbers)),
            _ => Err(unexpected()),
        }
    }

    fn lock_holders(&self, file: FileId) -> Vec<LockHolder> {
        match self.ask(&Ask::LockHolders { dev: file.dev, ino: file.ino }, None) {
            Ok((Answer::Holders(holders), _)) => {
                holders.into_iter().map(|(pid, command)| LockHolder { pid, command }).collect()
            }
            _ => Vec::new(),
        }
    }

    fn bind_socket(&self, path: &Path) -> io::Result<OwnedFd> {
        let socket = self.opened(&Ask::BindSocket { path: path.into() }, None)?;
        // The kernel tells front-ends who called `listen` last: that must be the server, not its helper.
        rustix::net::listen(&socket, LISTEN_BACKLOG)?;
        Ok(socket)
    }

    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        self.done(&Ask::SetSocketOwner { path: path.into(), mode, uid, gid })
    }

    fn connect_socket(&self, path: &Path) -> io::Result<()> {
        self.done(&Ask::ConnectSocket { path: path.into() })
    }

    fn adopt_image(&self, path: &Path, file: BorrowedFd<'_>) -> io::Result<()> {
        self.ask(&Ask::AdoptImage { path: path.into() }, Some(file)).map(drop)
    }

    fn adopt_socket(&self, path: &Path, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.ask(&Ask::AdoptSocket { path: path.into() }, Some(socket)).map(drop)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        self.done(&Ask::Unlink { path: path.into() })
    }
}
