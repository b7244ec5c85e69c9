//! The one door to the file system: every open, bind, unlink and look-up by path.
//!
//! A server that later shuts itself into a sandbox has no file system left; it then talks to a helper through
//! another implementation of [`Opener`]. Everything a trait method takes or gives can travel over a socket.
//!
//! Not here: doing it directly (`host_opener.rs`), what the opened file is good for (`image.rs`).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::image::Access;
use crate::lock::{FileId, LockHolder};
use crate::sysfs_queue::QueueAttributes;

/// How an image is to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenRequest {
    /// For reading only, or for writing too.
    pub access: Access,
    /// Past the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Make the file, this many bytes long, mode 0600; one that exists is an error (`O_CREAT | O_EXCL`).
    pub create: Option<u64>,
    /// Claim a block device: fails with `EBUSY` if the kernel or another program has, and keeps the kernel from
    /// mounting it (`O_EXCL`). Not for files.
    pub exclusive: bool,
}

/// What a path names, after following links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
    /// A folder.
    Directory,
    /// A character device.
    CharacterDevice,
    /// A named pipe.
    Fifo,
    /// A unix socket.
    Socket,
    /// Something newer than this list.
    Other,
}

impl std::fmt::Display for FileKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Regular => "regular file",
            Self::BlockDevice => "block device",
            Self::Directory => "directory",
            Self::CharacterDevice => "character device",
            Self::Fifo => "named pipe",
            Self::Socket => "socket",
            Self::Other => "file of unknown type",
        })
    }
}

impl From<std::fs::FileType> for FileKind {
    fn from(file_type: std::fs::FileType) -> Self {
        use std::os::unix::fs::FileTypeExt;
        match file_type {
            t if t.is_file() => Self::Regular,
            t if t.is_block_device() => Self::BlockDevice,
            t if t.is_dir() => Self::Directory,
            t if t.is_char_device() => Self::CharacterDevice,
            t if t.is_fifo() => Self::Fifo,
            t if t.is_socket() => Self::Socket,
            _ => Self::Other,
        }
    }
}

/// Every action on a path that the server takes after start-up.
pub trait Opener: Send + Sync + std::fmt::Debug {
    /// What `path` names, links followed.
    ///
    /// # Errors
    /// `stat`'s; a path that names nothing is [`io::ErrorKind::NotFound`].
    fn file_kind(&self, path: &Path) -> io::Result<FileKind>;

    /// The absolute path without links, `.` and `..`.
    ///
    /// # Errors
    /// `realpath`'s.
    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf>;

    /// Which file `path` itself is, a link being its own: whether what lies there is still what we put there.
    ///
    /// # Errors
    /// `lstat`'s; a path that names nothing is [`io::ErrorKind::NotFound`].
    fn file_id(&self, path: &Path) -> io::Result<FileId>;

    /// Opens (or makes) a disk image. Does not wait on a named pipe or for a medium. A new file is on stable
    /// storage; none is left behind on failure.
    ///
    /// # Errors
    /// `open`'s; `EINVAL` with `request.direct` means that the file system has no `O_DIRECT`.
    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd>;

    /// The file that is open as `file`, open once more: a description of its own, whatever its name is by now.
    ///
    /// # Errors
    /// `open`'s, for the file by its number in `/proc/self/fd`.
    fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd>;

    /// Opens a configuration file, to be read.
    ///
    /// # Errors
    /// `open`'s.
    fn open_configuration(&self, path: &Path) -> io::Result<OwnedFd>;

    /// What the kernel says about a block device's queue.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when `major:minor` is no block device (tmpfs, NFS and btrfs have none).
    fn queue_attributes(&self, major: u32, minor: u32) -> io::Result<QueueAttributes>;

    /// The processes that hold image locks on a file, as far as they can be seen. For error messages.
    fn lock_holders(&self, file: FileId) -> Vec<LockHolder>;

    /// A listening, close-on-exec stream socket at `path`, never connectable with wider rights than 0600.
    ///
    /// # Errors
    /// `socket`'s, `bind`'s and `listen`'s: `EADDRINUSE` if `path` exists, alive or not; `ENAMETOOLONG` if
    /// `path` does not fit a socket address (108 bytes).
    fn bind_socket(&self, path: &Path) -> io::Result<OwnedFd>;

    /// Gives a socket file its owner and group, then its mode (in this order: never too wide in between).
    ///
    /// # Errors
    /// `chown`'s and `chmod`'s; [`io::ErrorKind::InvalidInput`] if `path` is no socket (or a link).
    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()>;

    /// Connects to a stream socket and leaves again, to find out whether a server lives behind it. Never blocks.
    /// The connection is not handed out: it could have been made with more rights than the caller's.
    ///
    /// # Errors
    /// `connect`'s. [`io::ErrorKind::ConnectionRefused`]: the server is gone. [`io::ErrorKind::WouldBlock`]:
    /// **alive**, with a full queue of connections.
    fn connect_socket(&self, path: &Path) -> io::Result<()>;

    /// `file` is the image at `path`, opened by the server before this one: from now on as if it had been opened here.
    ///
    /// # Errors
    /// It is not what `path` names, or must not be opened.
    fn adopt_image(&self, path: &Path, file: BorrowedFd<'_>) -> io::Result<()> {
        let _ = (path, file);
        Ok(())
    }

    /// `socket` listens at `path`, made by the server before this one: from now on as if it had been made here.
    ///
    /// # Errors
    /// It does not, or must not be made.
    fn adopt_socket(&self, path: &Path, socket: BorrowedFd<'_>) -> io::Result<()> {
        let _ = (path, socket);
        Ok(())
    }

    /// Whether the image that was just opened at `path` has its lock already, because it was adopted. Asked once per image.
    fn comes_locked(&self, path: &Path) -> bool {
        let _ = path;
        false
    }

    /// Removes a file or socket.
    ///
    /// # Errors
    /// `unlink`'s.
    fn unlink(&self, path: &Path) -> io::Result<()>;
}
