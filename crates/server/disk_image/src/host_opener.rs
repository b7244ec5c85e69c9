//! The opener of a server without a sandbox: works directly, in the calling thread.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::file::{Access, FileId, FileKind, LockHolder};
use crate::opener::{MAX_SOCKET_PATH_BYTES, OpenRequest, Opener};
use crate::sysfs_queue::QueueAttributes;

/// A new image may hold any user's data, so only its owner may read it.
const NEW_IMAGE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// Until [`Opener::set_socket_owner`] changes the mode, only the server's user can connect.
const NEW_SOCKET_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
/// Limit on connections that wait while the server starts a session; each listener serves one disk.
pub const LISTEN_BACKLOG: i32 = 16;

/// Uses the host's file system directly.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostOpener;

impl Opener for HostOpener {
    fn file_kind(&self, path: &Path) -> io::Result<FileKind> {
        Ok(std::fs::metadata(path)?.file_type().into())
    }

    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf> {
        std::fs::canonicalize(path)
    }

    fn file_id(&self, path: &Path) -> io::Result<FileId> {
        Ok(FileId::from(&std::fs::symlink_metadata(path)?))
    }

    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd> {
        match request.create {
            Some(len_bytes) => create_image(path, len_bytes, request),
            None => open_existing(path, request),
        }
    }

    fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let flags = rustix::fs::fcntl_getfl(file)?;
        let kept = OFlags::RWMODE | OFlags::DIRECT;
        let flags = flags & kept | OFlags::CLOEXEC | OFlags::NOCTTY;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(rustix::fs::open(path, flags, Mode::empty())?)
    }

    fn path_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<PathBuf>> {
        std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).map(Some)
    }

    fn open_configuration(&self, path: &Path) -> io::Result<OwnedFd> {
        Ok(File::open(path)?.into())
    }

    fn queue_attributes(&self, major: u32, minor: u32) -> io::Result<QueueAttributes> {
        QueueAttributes::read(Path::new(&format!("/sys/dev/block/{major}:{minor}")))
    }

    fn lock_holders(&self, file: FileId) -> Vec<LockHolder> {
        crate::lock::find_holders(Path::new("/proc"), file)
    }

    fn bind_socket(&self, path: &Path) -> io::Result<OwnedFd> {
        if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            return Err(rustix::io::Errno::NAMETOOLONG.into());
        }
        let address = SocketAddrUnix::new(path)?;
        let socket = stream_socket(SocketFlags::CLOEXEC)?;
        // Linux gives the new file the mode of the socket's own inode (minus the umask), so no other user ever has
        // access; and no client can connect before `listen`.
        rustix::fs::fchmod(&socket, NEW_SOCKET_MODE)?;
        rustix::net::bind(&socket, &address)?;
        listen_if_private(&socket, path).inspect_err(|_| drop(std::fs::remove_file(path)))?;
        Ok(socket)
    }

    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        // The descriptor pins the file, so another process cannot divert the change by replacing the path meanwhile.
        let pinned =
            rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let pinned = File::from(pinned);
        let kind = FileKind::from(pinned.metadata()?.file_type());
        if kind != FileKind::Socket {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("not a socket but a {kind}")));
        }
        if uid.is_some() || gid.is_some() {
            let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
            rustix::fs::chownat(&pinned, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        // `fchmod` refuses an O_PATH descriptor, but `chmod` accepts its link in /proc.
        let link = format!("/proc/self/fd/{}", pinned.as_raw_fd());
        std::fs::set_permissions(link, Permissions::from_mode(mode))
    }

    fn connect_socket(&self, path: &Path) -> io::Result<()> {
        let address = SocketAddrUnix::new(path)?;
        let socket = stream_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        Ok(rustix::net::connect(&socket, &address)?)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }
}

fn open_existing(path: &Path, request: &OpenRequest) -> io::Result<OwnedFd> {
    let mut flags = base_flags(request.access);
    flags.set(OFlags::DIRECT, request.direct);
    flags.set(OFlags::EXCL, request.exclusive);
    let image = rustix::fs::open(path, flags, Mode::empty())?;
    make_blocking(&image, request.direct)?;
    Ok(image)
}

fn create_image(path: &Path, len_bytes: u64, request: &OpenRequest) -> io::Result<OwnedFd> {
    let flags = base_flags(request.access) | OFlags::CREATE | OFlags::EXCL;
    let image = rustix::fs::open(path, flags, NEW_IMAGE_MODE)?;
    // O_DIRECT is set afterwards: an `open` that fails because of it has already created the file.
    let made = rustix::fs::ftruncate(&image, len_bytes)
        .and_then(|()| make_blocking(&image, request.direct))
        .and_then(|()| keep_through_power_cut(&image, path));
    if let Err(error) = made {
        drop(std::fs::remove_file(path));
        return Err(error.into());
    }
    Ok(image)
}

/// Makes the new file and its length durable, because a guest's flush syncs only the data.
fn keep_through_power_cut(image: &OwnedFd, path: &Path) -> rustix::io::Result<()> {
    rustix::fs::fsync(image)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let synced = rustix::fs::open(folder, flags, Mode::empty()).and_then(rustix::fs::fsync);
    match synced {
        // The user may write to the directory but not list it, or the file system lacks this call.
        Err(error @ (Errno::ACCESS | Errno::PERM | Errno::INVAL)) => {
            tracing::warn!(
                %error,
                folder = %folder.display(),
                "the new image's folder cannot be synced: a power failure may remove the image"
            );
            Ok(())
        }
        synced => synced,
    }
}

/// With `O_NONBLOCK`, because the open would hang if another process replaced the path with a named pipe after the
/// check.
fn base_flags(access: Access) -> OFlags {
    let access = match access {
        Access::ReadWrite => OFlags::RDWR,
        Access::ReadOnly => OFlags::RDONLY,
    };
    access | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK
}

/// Clears `O_NONBLOCK`, with which io_uring would fail with EAGAIN instead of waiting, and sets or clears `O_DIRECT`.
fn make_blocking(image: impl AsFd, direct: bool) -> rustix::io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(&image)?;
    flags.remove(OFlags::NONBLOCK);
    flags.set(OFlags::DIRECT, direct);
    rustix::fs::fcntl_setfl(&image, flags)
}

fn stream_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Starts to listen, unless the kernel gave the socket file a wider mode than requested.
fn listen_if_private(socket: &OwnedFd, path: &Path) -> io::Result<()> {
    let mode = std::fs::symlink_metadata(path)?.permissions().mode() & 0o777;
    if mode & !NEW_SOCKET_MODE.as_raw_mode() != 0 {
        return Err(io::Error::other(format!(
            "the new socket's file has mode {mode:o}, which is wider than 600"
        )));
    }
    rustix::net::listen(socket, LISTEN_BACKLOG)?;
    Ok(())
}

#[cfg(test)]
#[path = "host_opener_tests.rs"]
mod tests;
