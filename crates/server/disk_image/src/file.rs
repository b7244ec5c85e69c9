//! Properties of a file: access, type, identity, and the processes that hold its lock.

use std::os::unix::fs::MetadataExt;

/// The guest's access to the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Only read.
    ReadOnly,
}

/// The type of a path's target, after following links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
    /// A directory.
    Directory,
    /// A character device.
    CharacterDevice,
    /// A named pipe.
    Fifo,
    /// A unix socket.
    Socket,
    /// Any other type.
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

/// Identity of a file, independent of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    /// The file system's device number.
    pub dev: u64,
    /// The inode number in that file system.
    pub ino: u64,
}

impl From<&std::fs::Metadata> for FileId {
    fn from(metadata: &std::fs::Metadata) -> Self {
        Self { dev: metadata.dev(), ino: metadata.ino() }
    }
}

/// A process that holds a lock on an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockHolder {
    /// The process id.
    pub pid: u32,
    /// The process's command name; empty if /proc does not show it.
    pub command: String,
}

impl std::fmt::Display for LockHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pid, command } = self;
        if *pid == std::process::id() {
            return write!(f, "another disk of this process (pid {pid})");
        }
        if command.is_empty() { write!(f, "process {pid}") } else { write!(f, "{command} (pid {pid})") }
    }
}
