//! What the helper opens, binds and removes for the server: only what the operator has named.
//!
//! - Allows images, sockets and the configuration file named at the start, and those that the file names on a reload:
//!   the helper reads the file itself.
//! - Connects to the NBD servers of disks named at the start and in the configuration file, and to no others. Opens these
//!   disks' files with credentials for TLS.
//! - Opens an image that was named as readonly only for reading.
//! - Opens images in and below the folders with backing files, for reading only. Which of them belong to a disk, the
//!   images themselves say, and the server follows.
//! - With a control socket, also allows what clients add: images in and below the folders of the named images and of
//!   `--allow-folders`; sockets in the folders of the named sockets and of `--allow-folders`, not below. The helper
//!   cannot distinguish a client's request from one of a server that an attacker controls.
//! - Reopens only files that it opened before. Changes only sockets that it created. Removes only these, images that it
//!   created, and sockets on which no process listens.
//! - Recognizes an image named as readonly by the path and the file that it had when it was opened: a new look-up might
//!   hang with the image's file system.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use disk_image::{FileId, HostOpener, Location, Opener};
use nbd_client::Address;
use serde::{Deserialize, Serialize};

use super::credentials::files_of;
use super::server_address::ServerAddress;

/// Maximum length of a configuration file: the server refuses a longer one. Ten thousand disks with every key take
/// less.
pub const MAX_CONFIGURATION_BYTES: u64 = 16 << 20;
/// Folders of the kernel's virtual file systems: their files may look like images but are none.
const NEVER: [&str; 2] = ["/proc", "/sys"];

/// The operations that the server may request. The server can extend the policy only before it serves.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Policy {
    pub images: Vec<OsString>,
    /// Images that the helper never opens for writing.
    pub readonly_images: Vec<OsString>,
    pub sockets: Vec<OsString>,
    pub configuration: Option<OsString>,
    /// NBD servers to which the server may connect.
    pub servers: Vec<ServerAddress>,
    /// Files with credentials for TLS that the server may read.
    pub credentials: Vec<OsString>,
    /// Below these folders the server may open or create any image.
    pub image_folders: Vec<OsString>,
    /// Below these folders the server may open any image for reading.
    pub backing_folders: Vec<OsString>,
    /// In these folders, not below them, the server may create any socket.
    pub socket_folders: Vec<OsString>,
    /// Whether the server takes over from another server, and may adopt that server's images and sockets.
    pub adopts: bool,
    /// Whether the policy is complete: then nothing can be added.
    pub complete: bool,
}

impl Policy {
    /// Resolves links in the folders. A folder that does not exist allows nothing.
    pub fn resolved(self) -> Self {
        let real = |folders: Vec<OsString>| {
            let real = folders.into_iter().filter_map(|folder| std::fs::canonicalize(folder).ok());
            real.map(PathBuf::into_os_string).collect()
        };
        let (image_folders, socket_folders) = (real(self.image_folders), real(self.socket_folders));
        let backing_folders = real(self.backing_folders);
        Self { image_folders, backing_folders, socket_folders, ..self }
    }

    /// Splits the policy into parts, each of which fits into one message.
    pub fn pieces(&self, paths_at_a_time: usize) -> Vec<Self> {
        type Put = fn(&mut Policy, Vec<OsString>);
        let lists: [(&[OsString], Put); 7] = [
            (&self.images, |piece, paths| piece.images = paths),
            (&self.readonly_images, |piece, paths| piece.readonly_images = paths),
            (&self.sockets, |piece, paths| piece.sockets = paths),
            (&self.credentials, |piece, paths| piece.credentials = paths),
            (&self.image_folders, |piece, paths| piece.image_folders = paths),
            (&self.backing_folders, |piece, paths| piece.backing_folders = paths),
            (&self.socket_folders, |piece, paths| piece.socket_folders = paths),
        ];
        let named = lists.into_iter().flat_map(|(list, put)| {
            list.chunks(paths_at_a_time).map(move |paths| {
                let mut piece = Self::default();
                put(&mut piece, paths.to_vec());
                piece
            })
        });
        let servers = self.servers.chunks(paths_at_a_time);
        let servers = servers.map(|servers| Self { servers: servers.to_vec(), ..Self::default() });
        let (configuration, adopts) = (self.configuration.clone(), self.adopts);
        let last = Self { configuration, adopts, complete: true, ..Self::default() };
        named.chain(servers).chain([last]).collect()
    }
}

/// Why an image is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The operator named its path.
    Named,
    /// The image's current path is in one of the folders.
    Beside,
}

/// An open file: its path without symbolic links, and its identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileLocation {
    pub real: PathBuf,
    pub file: FileId,
}

impl FileLocation {
    /// Describes an open file without looking up its path.
    pub fn of(file: &OwnedFd) -> io::Result<Self> {
        let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let file = FileId::from(&File::from(file.try_clone()?).metadata()?);
        Ok(Self { real, file })
    }
}

/// An image that the operator named.
#[derive(Debug, Clone, Default)]
struct Named {
    may_write: bool,
    /// The image's path and file when the helper last opened it.
    opened: Option<FileLocation>,
}

/// The policy, with what has been opened and created so far.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    images: HashMap<PathBuf, Named>,
    sockets: HashSet<PathBuf>,
    configuration: Option<PathBuf>,
    servers: HashSet<ServerAddress>,
    credentials: HashSet<PathBuf>,
    image_folders: HashSet<PathBuf>,
    backing_folders: HashSet<PathBuf>,
    socket_folders: HashSet<PathBuf>,
    complete: bool,
    /// Images that the helper opened.
    opened: HashSet<(u64, u64)>,
    /// Images that the helper created on request, and may remove again.
    made: HashMap<PathBuf, FileId>,
    adopts: bool,
    /// Paths at which the helper created or adopted sockets. A later socket there may belong to another program.
    had_sockets: HashSet<PathBuf>,
    /// Socket files that the helper created.
    bound: HashSet<(u64, u64)>,
}

impl Allowed {
    /// `policy` must come from [`Policy::resolved`].
    pub fn extend(&mut self, policy: Policy) -> io::Result<()> {
        if self.complete {
            return Err(denied(
                "the policy of the sandbox's helper is complete: nothing can be added".to_owned(),
            ));
        }
        let paths = |paths: Vec<OsString>| paths.into_iter().map(PathBuf::from);
        paths(policy.images).for_each(|path| self.name(path, true));
        paths(policy.readonly_images).for_each(|path| self.name(path, false));
        self.sockets.extend(paths(policy.sockets));
        self.servers.extend(policy.servers);
        self.credentials.extend(paths(policy.credentials));
        self.image_folders.extend(paths(policy.image_folders));
        self.backing_folders.extend(paths(policy.backing_folders));
        self.socket_folders.extend(paths(policy.socket_folders));
        self.configuration = self.configuration.take().or(policy.configuration.map(PathBuf::from));
        self.adopts |= policy.adopts;
        self.complete = policy.complete;
        Ok(())
    }

    /// The folders with backing files that the configuration file names, without links.
    pub fn backing_folders_in(text: &str) -> Vec<PathBuf> {
        let Ok(table) = text.parse::<toml::Table>() else { return Vec::new() };
        let disks = table.get("disk").and_then(toml::Value::as_array).into_iter().flatten();
        let named =
            disks.chain(table.get("defaults")).filter_map(|disk| disk.get("backing-folders")?.as_str());
        let folders = named.flat_map(|folders| folders.split(':'));
        folders.filter_map(|folder| std::fs::canonicalize(folder).ok()).collect()
    }

    /// Allows images below these folders to be read.
    pub fn extend_backing_folders(&mut self, folders: Vec<PathBuf>) {
        self.backing_folders.extend(folders);
    }

    /// Allows what the configuration file names now. The server reports mistakes in the file.
    pub fn extend_from_file(&mut self, text: &str) {
        let Ok(table) = text.parse::<toml::Table>() else { return };
        let disks = table.get("disk").and_then(toml::Value::as_array);
        let usual = table.get("defaults").and_then(|defaults| defaults.get("readonly"));
        for disk in disks.into_iter().flatten() {
            let path = |key| disk.get(key).and_then(toml::Value::as_str).map(PathBuf::from);
            let readonly = disk.get("readonly").or(usual);
            let may_write = readonly.is_none_or(|readonly| readonly.as_bool() == Some(false));
            if let Some(image) = path("image") {
                match Location::parse(&image) {
                    Ok(Location::Nbd(uri)) => {
                        self.servers.extend([ServerAddress::from(&uri.address)]);
                        self.credentials.extend(files_of(&uri).into_iter().map(PathBuf::from));
                    }
                    Ok(Location::Host) => self.name(image, may_write),
                    Ok(Location::Rbd(_)) | Err(_) => {}
                }
            }
            self.sockets.extend(path("socket"));
        }
    }

    /// An image that was named writable stays writable if it is named again as readonly.
    fn name(&mut self, image: PathBuf, may_write: bool) {
        self.images.entry(image).or_default().may_write |= may_write;
    }

    /// Whether the helper may open (for writing too if `written`) or create this image.
    pub fn image(&self, path: &Path, written: bool) -> io::Result<Found> {
        match self.images.get(path) {
            Some(named) if named.may_write || !written => Ok(Found::Named),
            Some(_) => Err(denied(readonly(path))),
            None => self.in_a_folder(path, &real_path(path)?, written).map(|()| Found::Beside),
        }
    }

    fn in_a_folder(&self, path: &Path, real: &Path, written: bool) -> io::Result<()> {
        let never = NEVER.iter().any(|folder| real.starts_with(folder));
        let backing = self.backing_folders.iter().filter(|_| !written);
        if never || !self.image_folders.iter().chain(backing).any(|folder| real.starts_with(folder)) {
            return Err(denied(outside(path, "images")));
        }
        Ok(())
    }

    /// Checks that the server may open an image in one of the folders: `location` is the file found at `path`.
    pub fn image_beside(&self, path: &Path, location: &FileLocation, written: bool) -> io::Result<()> {
        self.in_a_folder(path, &location.real, written)?;
        let is_it = |(path, named): (&PathBuf, &Named)| match &named.opened {
            Some(opened) => opened.file == location.file || opened.real == location.real,
            None => std::fs::canonicalize(path).is_ok_and(|real| real == location.real),
        };
        if written && self.images.iter().filter(|(_, named)| !named.may_write).any(is_it) {
            return Err(denied(readonly(path)));
        }
        Ok(())
    }

    /// Checks that the server may create this socket or connect to it.
    pub fn socket(&self, path: &Path) -> io::Result<()> {
        // A link at the socket's own name is never followed, so only the folder is resolved.
        if self.sockets.contains(path) || self.socket_folders.contains(&real_folder(path)?) {
            return Ok(());
        }
        Err(denied(outside(path, "sockets")))
    }

    /// Checks that the server may connect to this NBD server.
    pub fn server(&self, server: &ServerAddress) -> io::Result<()> {
        if self.servers.contains(server) {
            return Ok(());
        }
        let address = Address::from(server.clone());
        Err(denied(format!(
            "the sandbox does not allow NBD server {address}: it must be that of a disk given at the server's start, or in \
             the configuration file"
        )))
    }

    /// Checks that the server may read this file with credentials.
    pub fn credentials(&self, path: &Path) -> io::Result<()> {
        if self.credentials.contains(path) {
            return Ok(());
        }
        Err(denied(
            "the sandbox does not allow this file: it must be that of a disk given at the server's start, or in the \
             configuration file"
                .to_owned(),
        ))
    }

    pub fn configuration(&self, path: &Path) -> io::Result<()> {
        if self.configuration.as_deref() == Some(path) {
            return Ok(());
        }
        Err(denied(format!(
            "{} is not the configuration file that was given at the server's start",
            path.display()
        )))
    }

    /// Remembers an image that the helper opened.
    pub fn opened(&mut self, path: &Path, location: FileLocation) {
        self.opened.insert((location.file.dev, location.file.ino));
        if let Some(named) = self.images.get_mut(path) {
            named.opened = Some(location);
        }
    }

    /// Checks that the server may reopen this file.
    pub fn reopen(&self, file: FileId) -> io::Result<()> {
        if self.opened.contains(&(file.dev, file.ino)) {
            return Ok(());
        }
        Err(denied("the sandbox's helper reopens only images that it opened".to_owned()))
    }

    /// Remembers an image that the helper created.
    pub fn made(&mut self, path: &Path, location: &FileLocation) {
        self.made.extend([(path.to_owned(), location.file), (location.real.clone(), location.file)]);
    }

    /// The file that the helper created under this name, which it may remove once.
    pub fn forget_made(&mut self, path: &Path) -> Option<FileId> {
        let file = self.made.remove(path)?;
        self.made.retain(|_, other| *other != file);
        Some(file)
    }

    /// Whether the server may adopt images and sockets of another server.
    pub fn adopts(&self) -> io::Result<()> {
        if self.adopts {
            Ok(())
        } else {
            Err(denied("this server was not started with --take-over".to_owned()))
        }
    }

    /// Checks that the server may adopt a socket for this path: once, and only if the helper created none there.
    pub fn adopt_socket(&self, path: &Path) -> io::Result<()> {
        self.adopts()?;
        self.socket(path)?;
        if self.had_sockets.contains(path) {
            return Err(denied(format!(
                "the sandbox's helper has already created or adopted a socket at {}",
                path.display()
            )));
        }
        Ok(())
    }

    /// Remembers a socket file that the helper created or adopted.
    pub fn bound(&mut self, path: &Path, file: FileId) {
        self.had_sockets.insert(path.to_owned());
        self.bound.insert((file.dev, file.ino));
    }

    /// Forgets a socket that the helper is about to remove.
    pub fn forget_bound(&mut self, file: FileId) {
        self.bound.remove(&(file.dev, file.ino));
    }

    /// Checks that the server may change this socket's owner and mode.
    pub fn own_socket(&self, path: &Path, file: FileId) -> io::Result<()> {
        if self.bound.contains(&(file.dev, file.ino)) {
            return Ok(());
        }
        Err(denied(format!("{} is not a socket that the sandbox's helper created", path.display())))
    }

    /// Checks that the server may remove the socket at `path`: the helper created it, or no process listens on it.
    pub fn unlink(&self, path: &Path) -> io::Result<FileId> {
        use std::os::unix::fs::FileTypeExt;
        let metadata = std::fs::symlink_metadata(path)?;
        if !metadata.file_type().is_socket() {
            return Err(denied(format!("{} is not a socket", path.display())));
        }
        self.socket(path)?;
        let file = FileId::from(&metadata);
        if self.bound.contains(&(file.dev, file.ino)) || is_dead(path) {
            return Ok(file);
        }
        Err(denied(format!("socket {} is in use by another process", path.display())))
    }
}

fn outside(path: &Path, what: &str) -> String {
    format!(
        "the sandbox does not allow {}: {what} must be in a folder with {what} that were given at the \
         server's start, or in one of --allow-folders",
        path.display()
    )
}

fn readonly(path: &Path) -> String {
    format!(
        "{} was readonly at the server's start, so the sandbox does not open it for writing",
        path.display()
    )
}

fn is_dead(socket: &Path) -> bool {
    let tried = HostOpener.connect_socket(socket);
    tried.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn denied(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// The real path of a file that need not exist yet.
fn real_path(path: &Path) -> io::Result<PathBuf> {
    match std::fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    let folder = real_folder(path)?;
    Ok(path.file_name().map_or_else(|| folder.clone(), |name| folder.join(name)))
}

fn real_folder(path: &Path) -> io::Result<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    std::fs::canonicalize(folder.unwrap_or(Path::new(".")))
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
