//! A server in this process, to which the programs and calls of these tests connect.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blk_server::{Balance, DiskConfig, EngineSource, Server, ServerConfig, SocketConfig, Wce, WorkerOptions};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions, Opener};
use io_engine::{Engine, EngineConfig, IoUringEngine};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a test waits for something that must happen.
pub const PATIENCE: Duration = Duration::from_secs(300);

pub const IMAGE_BYTES: u64 = 16 << 20;

pub struct Disk {
    pub folder: tempfile::TempDir,
    pub socket: PathBuf,
    image: PathBuf,
    server: Option<Server>,
}

impl Disk {
    /// Serves an empty image.
    pub fn serve() -> Self {
        let folder = tempfile::Builder::new().prefix("capi-").tempdir().unwrap();
        let (image, socket) = (folder.path().join("disk.raw"), folder.path().join("disk.sock"));
        File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        let opener: Arc<dyn Opener> = Arc::new(HostOpener);
        let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(&image) };
        let opened = Image::open(opener.as_ref(), &options).unwrap();
        let serial = opened.default_serial();
        let (queues, queue_size, wce) = (4, 256, Wce::Guest);
        let disk = DiskConfig {
            name: "disk".into(),
            image: opened,
            serial,
            queues,
            queue_size,
            wce,
            engine: None,
            workers: None,
            coalescing: None,
            park: None,
        };
        let config = EngineConfig::default();
        let depth = config.depth;
        let make = move || Ok(Box::new(IoUringEngine::new(config.clone())?) as Box<dyn Engine>);
        let engine = EngineSource::new("io_uring", depth, Box::new(make));
        let server = ServerConfig {
            engine,
            workers: vec![WorkerOptions::default()],
            poll: Duration::ZERO,
            balance: Balance::Off,
        };
        let place = SocketConfig { path: socket.clone(), mode: 0o600, uid: None, gid: None };
        let server = Some(Server::start(&server, &opener, vec![(disk, place)]).unwrap());
        Self { folder, socket, image, server }
    }

    /// Stops the server, once. Front-ends lose their connections.
    pub fn stop(&mut self) {
        let _ = self.server.take().unwrap().stop(PATIENCE);
    }

    pub fn bytes(&self, offset_bytes: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        File::open(&self.image).unwrap().read_exact_at(&mut bytes, offset_bytes).unwrap();
        bytes
    }
}

/// Whether the descriptor becomes readable within the patience of a test.
pub fn wait_readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })).unwrap() == 1
}

/// A file without a name, of `bytes` bytes.
pub fn memfd(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("capi-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}
