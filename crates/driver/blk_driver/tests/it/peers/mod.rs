//! The back-ends of the tests: our server in this process, or qemu-storage-daemon as a child process.
//!
//! See also: their tests (`contract`), back-ends that break the rules (`hostile.rs`).
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

pub mod script;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_driver::Options;
use blk_server::{Balance, DiskConfig, EngineSource, Server, ServerConfig, SocketConfig, Wce, WorkerOptions};
use disk_image::{HostOpener, Image, ImageOptions, Opener};
use io_engine::{EngineConfig, IoUringEngine};

/// How long a test waits for something that must happen.
pub const PATIENCE: Duration = Duration::from_secs(300);
pub const MIB: u64 = 1 << 20;
pub const SECTOR: u64 = 512;
/// Size of the disk in all tests.
pub const DISK_BYTES: u64 = 16 * MIB;

/// A directory with an image, and the path of the socket to serve.
pub struct Place {
    pub folder: tempfile::TempDir,
    pub image: PathBuf,
    pub socket: PathBuf,
}

impl Place {
    pub fn new() -> Self {
        // Not /tmp: that may be a tmpfs, where O_DIRECT has no effect.
        let folder = tempfile::Builder::new().prefix("drv-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = folder.path().join("disk.raw");
        File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
        // The directory's path may be too long for a socket address.
        let name = format!("{}.sock", folder.path().file_name().unwrap().display());
        Self { image, socket: std::env::temp_dir().join(name), folder }
    }

    pub fn resize(&self, bytes: u64) {
        File::options().write(true).open(&self.image).unwrap().set_len(bytes).unwrap();
    }

    /// Fills the image with zeroes again.
    pub fn erase(&self) {
        File::options().write(true).truncate(true).open(&self.image).unwrap();
        self.resize(DISK_BYTES);
    }

    pub fn image_bytes(&self, offset_bytes: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let file = File::open(&self.image).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, offset_bytes).unwrap();
        bytes
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Our server, in this process.
pub struct Own {
    pub place: Place,
    pub queues: u16,
    pub server: Option<Server>,
}

impl Own {
    pub fn start(queues: u16) -> Self {
        let mut own = Self { place: Place::new(), queues, server: None };
        own.start_again();
        own
    }

    pub fn start_again(&mut self) {
        let opener: Arc<dyn Opener> = Arc::new(HostOpener);
        let engine = EngineConfig::default();
        let depth = engine.depth;
        let make = move || Ok(Box::new(IoUringEngine::new(engine.clone())?) as Box<dyn io_engine::Engine>);
        let options =
            ImageOptions { path: self.place.image.clone(), lock_timeout: PATIENCE, ..ImageOptions::new("") };
        let image = Image::open(opener.as_ref(), &options).unwrap();
        let disk = DiskConfig {
            name: "test".into(),
            serial: "serial-of-the-test".into(),
            image,
            queues: self.queues,
            queue_size: 1024,
            wce: Wce::Guest,
            engine: None,
            workers: None,
            coalescing: None,
            park: None,
        };
        let socket = SocketConfig { path: self.place.socket.clone(), mode: 0o600, uid: None, gid: None };
        let engine = EngineSource::new("io_uring", depth, Box::new(make));
        let workers = vec![WorkerOptions::default()];
        let config = ServerConfig { engine, workers, poll: Duration::from_micros(50), balance: Balance::Off };
        self.server = Some(Server::start(&config, &opener, vec![(disk, socket)]).unwrap());
    }

    pub fn stop(&mut self) {
        let report = self.server.take().unwrap().stop(PATIENCE);
        assert!(report.is_clean(), "{report:?}");
    }

    pub fn options(&self) -> Options {
        options(&self.place.socket)
    }
}

pub fn options(socket: &Path) -> Options {
    Options { timeout: PATIENCE, ..Options::new(socket) }
}

const STORAGE_DAEMON: &str = "qemu-storage-daemon";

/// QEMU's back-end, in a child process.
pub struct StorageDaemon {
    pub place: Place,
    queues: u16,
    child: Child,
}

impl StorageDaemon {
    /// `None`, after printing a line, if the program is not installed.
    pub fn start(queues: u16) -> Option<Self> {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&paths).any(|folder| folder.join(STORAGE_DAEMON).is_file()) {
            xtask::skip::skip(
                xtask::skip::Reason::NoProgram(STORAGE_DAEMON.into()),
                "Debian: package qemu-system-common",
            );
            return None;
        }
        let place = Place::new();
        let child = Self::spawn(&place, queues);
        Some(Self { place, queues, child })
    }

    fn spawn(place: &Place, queues: u16) -> Child {
        let (image, socket) = (place.image.display(), place.socket.display());
        let export = format!(
            "vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={socket},writable=on,num-queues={queues}"
        );
        let child = Command::new(STORAGE_DAEMON)
            .args(["--blockdev", &format!("file,node-name=file,filename={image},discard=unmap")])
            .args(["--blockdev", "raw,node-name=disk,file=file,discard=unmap"])
            .args(["--export", &export])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        assert!(eventually(|| listens(&place.socket)), "{STORAGE_DAEMON} does not listen");
        child
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the daemon, so that it cannot finish its requests.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::fs::remove_file(&self.place.socket).unwrap();
    }

    pub fn start_again(&mut self) {
        self.child = Self::spawn(&self.place, self.queues);
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process listens on the socket, whose file exists before that; the kernel's table has a flag for that
/// (`__SO_ACCEPTCON`).
fn listens(socket: &Path) -> bool {
    const FLAG: &str = " 00010000 ";
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.to_str().unwrap();
    table.lines().any(|line| line.ends_with(path) && line.contains(FLAG))
}

/// Repeats `check` until it holds or [`PATIENCE`] has passed.
pub fn eventually(mut check: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if check() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    check()
}
