//! The messages between server and helper: each is one datagram of JSON, and may carry descriptors.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use disk_image::{FileKind, QueueAttributes};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::policy::Policy;
use super::server_address::ServerAddress;

/// Maximum length of a message: enough for a few paths, each byte of which may take four.
pub const MAX_MESSAGE_BYTES: usize = 128 << 10;
/// Maximum number of descriptors in a message: the socket for the answer, and the file to reopen.
const MAX_FDS: usize = 2;

/// A request: the methods of `disk_image::Opener`, and the other operations on the host's files.
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Allows more files.
    Allow(Policy),
    FileKind {
        path: OsString,
    },
    CanonicalPath {
        path: OsString,
    },
    FileId {
        path: OsString,
    },
    OpenImage {
        path: OsString,
        writable: bool,
        direct: bool,
        create: Option<u64>,
        exclusive: bool,
    },
    /// The message carries the file.
    Reopen,
    /// An image that another server opened; the message carries it.
    AdoptImage {
        path: OsString,
    },
    /// A socket that another server created; the message carries it.
    AdoptSocket {
        path: OsString,
    },
    OpenConfiguration {
        path: OsString,
    },
    QueueAttributes {
        major: u32,
        minor: u32,
    },
    LockHolders {
        dev: u64,
        ino: u64,
    },
    BindSocket {
        path: OsString,
    },
    SetSocketOwner {
        path: OsString,
        mode: u32,
        uid: Option<u32>,
        gid: Option<u32>,
    },
    /// Whether a server listens on this socket. The helper closes the connection itself.
    ConnectSocket {
        path: OsString,
    },
    /// Connects to an NBD server. The answer has the connection.
    Dial {
        server: ServerAddress,
        timeout_ms: u64,
    },
    /// Opens a file with credentials for an NBD server. The answer has the file.
    OpenCredentials {
        path: OsString,
    },
    /// When a process started, if it exists.
    ProcessStart {
        pid: u32,
    },
    Unlink {
        path: OsString,
    },
    UserId {
        name: String,
    },
    GroupId {
        name: String,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    /// The message carries the file.
    Opened,
    Kind(u8),
    Path(OsString),
    FileId {
        dev: u64,
        ino: u64,
    },
    /// The fields of [`QueueAttributes`], in their order.
    Queue([u64; 8]),
    /// The ids and names of processes.
    Holders(Vec<(u32, String)>),
    Id(u32),
    Start(Option<u64>),
    Failed(Failure),
}

/// An `io::Error` as a message.
#[derive(Debug, Serialize, Deserialize)]
pub struct Failure {
    errno: Option<i32>,
    not_found: bool,
    invalid: bool,
    denied: bool,
    text: String,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let is = |kind| error.kind() == kind;
        Self {
            errno: error.raw_os_error(),
            not_found: is(io::ErrorKind::NotFound),
            invalid: is(io::ErrorKind::InvalidInput),
            denied: is(io::ErrorKind::PermissionDenied),
            text: error.to_string(),
        }
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        let kind = match failure {
            Failure { errno: Some(errno), .. } => return Self::from_raw_os_error(errno),
            Failure { not_found: true, .. } => io::ErrorKind::NotFound,
            Failure { invalid: true, .. } => io::ErrorKind::InvalidInput,
            Failure { denied: true, .. } => io::ErrorKind::PermissionDenied,
            Failure { .. } => io::ErrorKind::Other,
        };
        Self::new(kind, failure.text)
    }
}

const KINDS: [FileKind; 7] = [
    FileKind::Regular,
    FileKind::BlockDevice,
    FileKind::Directory,
    FileKind::CharacterDevice,
    FileKind::Fifo,
    FileKind::Socket,
    FileKind::Other,
];

pub fn kind_to_number(kind: FileKind) -> u8 {
    let place = KINDS.iter().position(|known| *known == kind);
    place.and_then(|place| u8::try_from(place).ok()).unwrap_or(u8::MAX)
}

pub fn kind_of_number(number: u8) -> FileKind {
    KINDS.get(usize::from(number)).copied().unwrap_or(FileKind::Other)
}

pub fn queue_to_numbers(queue: &QueueAttributes) -> [u64; 8] {
    [
        queue.logical_block_bytes,
        queue.physical_block_bytes,
        queue.minimum_io_bytes,
        queue.optimal_io_bytes,
        queue.alignment_offset_bytes,
        queue.discard_max_bytes,
        queue.discard_granularity_bytes,
        queue.write_zeroes_max_bytes,
    ]
}

pub fn queue_of_numbers(numbers: [u64; 8]) -> QueueAttributes {
    let [logical, physical, minimum, optimal, alignment, discard_max, granularity, write_zeroes] = numbers;
    QueueAttributes {
        logical_block_bytes: logical,
        physical_block_bytes: physical,
        minimum_io_bytes: minimum,
        optimal_io_bytes: optimal,
        alignment_offset_bytes: alignment,
        discard_max_bytes: discard_max,
        discard_granularity_bytes: granularity,
        write_zeroes_max_bytes: write_zeroes,
    }
}

/// A pair of connected sockets that preserve message boundaries.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends one message and copies of these descriptors.
pub fn send(socket: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message).map_err(io::Error::other)?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        let text = format!(
            "a message to or from the sandbox's helper has {} bytes, more than the limit of {MAX_MESSAGE_BYTES}",
            bytes.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    vhost_user::send(socket, &bytes, fds, SendFlags::empty())?;
    Ok(())
}

/// Waits for one message. `None`: the peer has closed the connection.
pub fn receive<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let (mut bytes, mut fds) = (vec![0; MAX_MESSAGE_BYTES], Vec::new());
    let received = match vhost_user::receive(socket, &mut bytes, RecvFlags::empty(), |fd| fds.push(fd)) {
        Ok(received) => received,
        Err(Errno::CONNRESET) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.truncated || received.fds_lost || fds.len() > MAX_FDS {
        return Err(io::Error::other("a message between server and helper was truncated"));
    }
    let message = bytes.get(..received.bytes).unwrap_or_default();
    Ok(Some((serde_json::from_slice(message).map_err(io::Error::other)?, fds)))
}

/// Waits until all copies of the other end are closed.
pub fn wait_closed(socket: impl AsFd) -> io::Result<()> {
    loop {
        match rustix::net::recv(&socket, &mut [0; 1], RecvFlags::empty()) {
            Ok(_) | Err(Errno::CONNRESET) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
