//! The settings of one disk: command line, configuration file and `ctl add` all call `DiskSettings::new`.
//!
//! `DiskArgs (+ image, socket) → DiskSettings::new → checked as far as possible without opening anything`

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blk_server::{DiskLimits, Placement, SocketConfig};
use disk_image::{
    Access, FileId, FileKind, ImageError, ImageOptions, Location, NewBacking, Opener, RbdOptions,
};
use io_engine::{EngineConfig, EngineOptions};
use qcow2::DiskFormat;
use rbd_client::ClusterOptions;

use crate::args::serve_args::{DiskArgs, Format, Switch, WceChoice};
use crate::args::usage::Contradiction;
use crate::args::values;
use crate::config::config_words::KeyValues;

/// The settings of one disk.
#[derive(Clone, Debug)]
pub struct DiskSettings {
    pub image: ImageOptions,
    pub socket: SocketConfig,
    /// The chosen engine with its options. `None`: the best engine that works.
    pub engine: Option<EngineOptions>,
    pub engine_config: EngineConfig,
    pub placement: Placement,
    /// `None`: all workers.
    pub workers: Option<WorkerChoice>,
    pub limits: DiskLimits,
    /// The disk's options, including those from which the fields above are made.
    pub options: DiskArgs,
    /// The keys whose values are not the defaults, as written: a reload compares them. Empty without a file.
    pub words: KeyValues,
}

impl DiskSettings {
    /// Looks up users and groups, and refuses options that contradict each other.
    pub fn new(image: PathBuf, socket: PathBuf, args: DiskArgs) -> Result<Self> {
        let (engine, engine_config) = (args.engine.options(args.cache)?, args.engine.configuration());
        let placement = args.placement.placement()?;
        let limits = DiskLimits { own: args.limits.settings()?, ..DiskLimits::default() };
        let socket = SocketConfig {
            path: socket,
            mode: args.socket_mode,
            uid: args.socket_owner.as_deref().map(values::user_id).transpose().context("--socket-owner")?,
            gid: args.socket_group.as_deref().map(values::group_id).transpose().context("--socket-group")?,
        };
        let image = ImageOptions {
            location: Location::parse(&image).context("image")?,
            path: image,
            access: if args.readonly { Access::ReadOnly } else { Access::ReadWrite },
            cache: args.cache,
            block_size: args.block_size,
            discard: args.discard == Switch::On,
            backing_folders: args.backing_folders.clone().map(|folders| folders.0).unwrap_or_default(),
            create_bytes: args.create,
            new_backing: new_backing(&args),
            nbd_timeout: Duration::from_secs(args.nbd_timeout),
            rbd: RbdOptions {
                cluster: ClusterOptions {
                    conf: args.rbd_conf.clone(),
                    id: args.rbd_id.clone(),
                    share: args.rbd_share_connection,
                },
                lock: args.rbd_lock == Switch::On,
            },
            lock_timeout: Duration::from_secs(args.lock_timeout),
        };
        if image.location.is_remote() && placement != Placement::Queue {
            bail!(Contradiction("a disk on another machine needs --placement queue"));
        }
        if args.is_qcow2() {
            check_qcow2(&image, placement)?;
        }
        check_backing(&args)?;
        image.check().map_err(|error| match error {
            ImageError::BlockSize { .. } => anyhow::Error::from(error).context("--block-size"),
            other => other.into(),
        })?;
        Ok(Self {
            image,
            socket,
            engine,
            engine_config,
            placement,
            workers: None,
            limits,
            options: args,
            words: KeyValues::default(),
        })
    }

    /// Whether a server that takes the disk over gets the image's descriptor, with its lock. If not, that server opens the
    /// image itself.
    pub fn comes_with_lock(&self) -> bool {
        !self.is_remote() && (!self.options.is_qcow2() || !self.read_only())
    }

    /// Whether the image is qcow2 and the guest may write.
    pub fn is_written_qcow2(&self) -> bool {
        self.options.is_qcow2() && !self.read_only()
    }

    /// The given name, else the image's path, with links resolved as far as possible.
    pub fn name(&self, opener: &dyn Opener) -> String {
        self.options.name.clone().unwrap_or_else(|| self.real_image(opener).display().to_string())
    }

    /// The image's path with links resolved, or its URI.
    pub fn real_image(&self, opener: &dyn Opener) -> PathBuf {
        match self.is_remote() {
            true => self.image.path.clone(),
            false => real_path(opener, &self.image.path),
        }
    }

    /// Whether the image is on another machine.
    pub fn is_remote(&self) -> bool {
        self.image.location.is_remote()
    }

    /// Keys of a `[[disk]]` table with their values: the usual ones, and those that a file or `ctl add` sets.
    pub fn shown(&self) -> BTreeMap<String, String> {
        let options = &self.options;
        let on_off = |on: bool| if on { "on" } else { "off" };
        let mut shown: BTreeMap<&str, String> = BTreeMap::from([
            ("image", self.image.path.display().to_string()),
            ("socket", self.socket.path.display().to_string()),
            ("queues", options.queues.to_string()),
            ("queue-size", options.queue_size.to_string()),
            ("cache", self.image.cache.to_string()),
            ("wce", if options.wce == WceChoice::Fixed { "fixed" } else { "guest" }.to_owned()),
            ("readonly", self.read_only().to_string()),
            ("discard", on_off(self.image.discard).to_owned()),
            ("socket-mode", format!("{:o}", self.socket.mode)),
            ("lock-timeout", options.lock_timeout.to_string()),
            ("placement", self.placement.to_string()),
            ("on-error", options.park().map_or("report".to_owned(), |park| park.what.to_string())),
        ]);
        shown.extend(options.serial.clone().map(|serial| ("serial", serial)));
        shown.extend(options.block_size.map(|bytes| ("block-size", bytes.to_string())));
        shown.extend(options.format.map(|format| ("format", format.name().to_owned())));
        shown.extend(self.words.iter().map(|(key, value)| (key, value.to_owned())));
        shown.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    pub fn read_only(&self) -> bool {
        self.image.access == Access::ReadOnly
    }

    /// The path that both disks use, if any: such disks cannot be served at the same time.
    pub fn conflict(&self, other: &Self, opener: &dyn Opener) -> Option<Shared> {
        if real_path(opener, &self.socket.path) == real_path(opener, &other.socket.path) {
            return Some(Shared::Socket);
        }
        let readers = self.read_only() && other.read_only();
        let same = || ImageIdentity::of(opener, &self.image) == ImageIdentity::of(opener, &other.image);
        (!readers && same()).then_some(Shared::Image)
    }

    /// Checks the image's path without opening it.
    pub fn check_image_path(&self, opener: &dyn Opener) -> Result<(), ImageError> {
        if self.is_remote() {
            return Ok(());
        }
        let path = || self.image.path.clone();
        match (opener.file_kind(&self.image.path), self.image.create_bytes) {
            (Ok(_), Some(_)) => Err(ImageError::Exists { path: path() }),
            (Ok(FileKind::Regular | FileKind::BlockDevice), None) => Ok(()),
            (Ok(kind), None) => Err(ImageError::NotAnImage { path: path(), kind }),
            (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
                Err(ImageError::Missing { path: path() })
            }
            // Opening the image will report the error in more detail.
            (Err(_), _) => Ok(()),
        }
    }
}

fn new_backing(args: &DiskArgs) -> Option<NewBacking> {
    let (path, format) = args.backing.clone().zip(args.backing_format)?;
    let format = if format == Format::Qcow2 { DiskFormat::Qcow2 } else { DiskFormat::Raw };
    Some(NewBacking { path, format })
}

fn check_backing(args: &DiskArgs) -> Result<()> {
    let refusal = match (&args.backing, args.backing_format) {
        (None, None) => return Ok(()),
        (None, Some(_)) => "--backing-format needs --backing",
        (Some(_), None) => "--backing needs --backing-format",
        (Some(_), Some(_)) if !args.is_qcow2() => "--backing needs --format qcow2",
        (Some(_), Some(_)) if args.create.is_none() => "--backing is for new images: it needs --create",
        _ => return Ok(()),
    };
    bail!(Contradiction(refusal))
}

/// Refuses what a qcow2 image cannot have.
fn check_qcow2(image: &ImageOptions, placement: Placement) -> Result<()> {
    let refusal = if image.location.is_remote() {
        "--format qcow2 needs an image on this host"
    } else if placement != Placement::Queue {
        "--format qcow2 needs --placement queue"
    } else {
        return Ok(());
    };
    bail!(Contradiction(refusal))
}

/// A path that two disks must not share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    Socket,
    Image,
}

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Socket => "socket",
            Self::Image => "image",
        })
    }
}

/// Identifies a file by device and inode, or by its path while it does not exist. Identifies an image on another machine
/// by its URI.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ImageIdentity {
    File(u64, u64),
    Path(PathBuf),
}

impl ImageIdentity {
    pub fn of(opener: &dyn Opener, image: &ImageOptions) -> Self {
        if image.location.is_remote() {
            return Self::Path(image.path.clone());
        }
        let real = real_path(opener, &image.path);
        match opener.file_id(&real) {
            Ok(FileId { dev, ino }) => Self::File(dev, ino),
            Err(_) => Self::Path(real),
        }
    }
}

/// Resolves links. The file need not exist if its folder does.
pub fn real_path(opener: &dyn Opener, path: &Path) -> PathBuf {
    if let Ok(real) = opener.canonical_path(path) {
        return real;
    }
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => return path.to_owned(),
    };
    match (opener.canonical_path(folder), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// Which workers serve a disk's queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerChoice {
    /// At most this many workers: the server chooses them, and the balancer may change them.
    Count(usize),
    /// These workers in turn, by the numbers that `ctl workers list` shows. The balancer does not move the disk's
    /// queues.
    These(Vec<u32>),
}

impl WorkerChoice {
    /// Names what the choice needs beyond `workers`: a larger number of workers, or the first missing worker.
    pub fn beyond(&self, workers: &[u32]) -> Option<String> {
        match self {
            Self::Count(count) if *count > workers.len() => Some(format!("{count} workers")),
            Self::Count(_) => None,
            Self::These(numbers) => {
                let missing = numbers.iter().find(|number| !workers.contains(number));
                missing.map(|number| format!("worker {number}"))
            }
        }
    }
}

/// Parses `2` or `[0, 3]`.
impl FromStr for WorkerChoice {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let usage = "give a number of workers or a list of them, such as 2 or [0, 3]";
        let Some(list) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) else {
            return match text.parse() {
                Ok(count) if count > 0 => Ok(Self::Count(count)),
                _ => bail!(usage),
            };
        };
        let numbers = list.split(',').map(|number| number.trim().parse().context(usage));
        Ok(Self::These(numbers.collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use disk_image::HostOpener;

    use super::*;

    #[test]
    fn workers_are_a_number_or_a_list() {
        assert_eq!("2".parse::<WorkerChoice>().unwrap(), WorkerChoice::Count(2));
        assert_eq!("[0, 3]".parse::<WorkerChoice>().unwrap(), WorkerChoice::These(vec![0, 3]));
        assert!("0".parse::<WorkerChoice>().is_err() && "[]".parse::<WorkerChoice>().is_err());
        assert!("all".parse::<WorkerChoice>().unwrap_err().to_string().contains("[0, 3]"));
    }

    #[test]
    fn worker_that_does_not_exist_is_named() {
        assert_eq!(WorkerChoice::Count(3).beyond(&[0, 1]).unwrap(), "3 workers");
        assert_eq!(WorkerChoice::These(vec![0, 2]).beyond(&[0, 1]).unwrap(), "worker 2");
        assert_eq!(WorkerChoice::These(vec![0, 1]).beyond(&[0, 1]), None);
    }

    #[test]
    fn numbers_are_those_of_the_workers_and_not_their_places() {
        assert_eq!(WorkerChoice::These(vec![7]).beyond(&[3, 7]), None);
        assert_eq!(WorkerChoice::These(vec![3, 1]).beyond(&[3, 7]).unwrap(), "worker 1");
        assert_eq!(WorkerChoice::Count(2).beyond(&[3, 7]), None);
    }

    #[test]
    fn image_is_the_same_behind_a_link_and_under_a_second_name() {
        let folder = tempfile::tempdir().unwrap();
        let [file, soft, hard] = ["file", "soft", "hard"].map(|name| folder.path().join(name));
        std::fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(&file, &soft).unwrap();
        std::fs::hard_link(&file, &hard).unwrap();
        let of = |path: &Path| ImageIdentity::of(&HostOpener, &ImageOptions::new(path));
        assert_eq!([of(&soft), of(&hard)], [of(&file), of(&file)]);
        assert_ne!(of(folder.path()), of(&file));
    }

    #[test]
    fn file_that_does_not_exist_yet_is_the_same_by_each_way_to_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, detour) = (folder.path().join("new"), folder.path().join("./new"));
        let of = |path: &Path| ImageIdentity::of(&HostOpener, &ImageOptions::new(path));
        assert_eq!(of(&plain), of(&detour));
    }
}
