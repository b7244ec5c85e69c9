//! The server's only access to the file system: every open, bind, unlink and look-up by path.
//!
//! A server that enters a sandbox loses its access to the file system. It then uses an implementation of [`Opener`]
//! that asks a helper process. All arguments and results of the trait's methods can be sent over a socket.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::file::{Access, FileId, FileKind, LockHolder};
use crate::sysfs_queue::QueueAttributes;

/// Longest path of a socket, in bytes: a socket address has room for 108, and many programs need a terminating zero
/// (unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// How to open an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenRequest {
    /// For reading only, or for reading and writing.
    pub access: Access,
    /// Bypasses the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Create the file with this many bytes and mode 0600; fail if it exists (`O_CREAT | O_EXCL`).
    pub create: Option<u64>,
    /// Claim a block device (`O_EXCL`): fails with `EBUSY` if the kernel or another program has claimed it, and keeps
    /// the kernel from mounting it. Has no effect on regular files.
    pub exclusive: bool,
}

/// Every action on a path after the server's start-up.
pub trait Opener: Send + Sync + std::fmt::Debug {
    /// The type of `path`'s target, after following links.
    ///
    /// # Errors
    /// Errors of `stat`; [`io::ErrorKind::NotFound`] if the path does not exist.
    fn file_kind(&self, path: &Path) -> io::Result<FileKind>;

    /// The absolute path without links, `.` and `..`.
    ///
    /// # Errors
    /// Errors of `realpath`.
    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf>;

    /// Identifies the file at `path`; a link is not followed. Tells whether the path still holds the file
    /// that we put there.
    ///
    /// # Errors
    /// Errors of `lstat`; [`io::ErrorKind::NotFound`] if the path does not exist.
    fn file_id(&self, path: &Path) -> io::Result<FileId>;

    /// Opens or creates a disk image. Never blocks on a named pipe or a missing medium. A new file is on stable storage
    /// when the call returns; a failed call leaves no file behind.
    ///
    /// # Errors
    /// Errors of `open`; `EINVAL` with `request.direct` means that the file system has no `O_DIRECT`.
    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd>;

    /// Opens the file behind `file` again, with its own open file description. The file's current name does
    /// not matter.
    ///
    /// # Errors
    /// Errors of `open`, for the descriptor's link in `/proc/self/fd`.
    fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd>;

    /// The path of an open file, as the kernel knows it now, for a check after the open. `None`: the opener itself checks
    /// each file that it has opened.
    ///
    /// # Errors
    /// Errors of `readlink`, for the descriptor's link in `/proc/self/fd`.
    fn path_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<PathBuf>>;

    /// Opens a configuration file for reading.
    ///
    /// # Errors
    /// Errors of `open`.
    fn open_configuration(&self, path: &Path) -> io::Result<OwnedFd>;

    /// The kernel's attributes of a block device's queue.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if `major:minor` is not a block device (files on tmpfs, NFS and btrfs have such
    /// numbers).
    fn queue_attributes(&self, major: u32, minor: u32) -> io::Result<QueueAttributes>;

    /// The processes that hold image locks on a file, as far as they are visible. For error messages.
    fn lock_holders(&self, file: FileId) -> Vec<LockHolder>;

    /// Creates a listening, close-on-exec stream socket at `path`. Its mode is 0600 from the start, so no
    /// other user can connect.
    ///
    /// # Errors
    /// Errors of `socket`, `bind` and `listen`: `EADDRINUSE` if `path` exists, whether or not a server listens there;
    /// `ENAMETOOLONG` if `path` is longer than [`MAX_SOCKET_PATH_BYTES`].
    fn bind_socket(&self, path: &Path) -> io::Result<OwnedFd>;

    /// Sets a socket file's owner and group, then its mode. In this order, access is never wider than requested in
    /// between.
    ///
    /// # Errors
    /// Errors of `chown` and `chmod`; [`io::ErrorKind::InvalidInput`] if `path` is not a socket (or is a link).
    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()>;

    /// Connects to a stream socket and closes the connection, to find out whether a server listens there. Never blocks.
    /// The caller does not get the connection, because the opener may have more rights than the caller.
    ///
    /// # Errors
    /// Errors of `connect`. [`io::ErrorKind::ConnectionRefused`]: no server listens any more.
    /// [`io::ErrorKind::WouldBlock`]: the server is **alive**, but its queue of connections is full.
    fn connect_socket(&self, path: &Path) -> io::Result<()>;

    /// Tells the opener that the previous server opened `file`, the image at `path`. The opener then treats the image
    /// as its own.
    ///
    /// # Errors
    /// `path` does not refer to `file`, or the opener may not open this path.
    fn adopt_image(&self, path: &Path, file: BorrowedFd<'_>) -> io::Result<()> {
        let _ = (path, file);
        Ok(())
    }

    /// Tells the opener that the previous server created `socket`, which listens at `path`. The opener then treats the
    /// socket as its own.
    ///
    /// # Errors
    /// `socket` does not listen at `path`, or the opener may not create a socket there.
    fn adopt_socket(&self, path: &Path, socket: BorrowedFd<'_>) -> io::Result<()> {
        let _ = (path, socket);
        Ok(())
    }

    /// Whether the image just opened at `path` is already locked because it was adopted. Called once per image.
    fn comes_locked(&self, path: &Path) -> bool {
        let _ = path;
        false
    }

    /// Removes a file or socket.
    ///
    /// # Errors
    /// Errors of `unlink`.
    fn unlink(&self, path: &Path) -> io::Result<()>;
}
