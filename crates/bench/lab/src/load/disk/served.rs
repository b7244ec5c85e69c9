//! A server in this process with its sockets in a temporary folder, and the driver's connections to it.
//!
//! - Sockets are in the system's temporary folder: a socket's path may have at most 107 bytes, and the
//!   results folder may be deep.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blk_driver::{Device, Options, PoolOptions, Queue, Reconnect};
use blk_server::{
    Balance, DiskConfig, EngineFactory, EngineSource, Server, ServerConfig, SocketConfig, Submissions, Wce,
    WorkerOptions,
};
use disk_image::{HostOpener, Image, Opener};
use tempfile::TempDir;

/// How long stopping the server may wait for a hanging request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The server. Dropping it stops the server; drop the connections first.
pub(crate) struct Served {
    server: Option<Server>,
    sockets: Vec<PathBuf>,
    queue_size: u16,
    _folder: TempDir,
}

impl Served {
    /// Serves `images`, one socket each, with one worker that counts its submissions and polls for up to
    /// `poll` before it sleeps.
    pub fn start(
        engine: EngineFactory,
        depth: u32,
        poll: Duration,
        queue_size: u16,
        images: Vec<Image>,
    ) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir()?;
        let place = |number| folder.path().join(format!("{number}.sock"));
        let sockets: Vec<_> = (0..images.len()).map(place).collect();
        let opener: Arc<dyn Opener> = Arc::new(HostOpener);
        let disks = images.into_iter().zip(&sockets).enumerate().map(|(number, (image, path))| {
            let (name, serial) = (format!("lab-{number}"), "lab".to_owned());
            let disk = DiskConfig {
                name,
                image,
                serial,
                queues: 1,
                queue_size,
                wce: Wce::Guest,
                engine: None,
                workers: None,
                coalescing: None,
                park: None,
            };
            (disk, SocketConfig { path: path.clone(), mode: 0o600, uid: None, gid: None })
        });
        let engine = EngineSource::new("lab", depth, engine);
        let config =
            ServerConfig { engine, workers: vec![WorkerOptions::default()], poll, balance: Balance::Off };
        let server = Server::start_counting(&config, &opener, disks.collect()).map_err(io::Error::other)?;
        Ok(Self { server: Some(server), sockets, queue_size, _folder: folder })
    }

    /// Connects the driver to disk `number`, with a pool of `pool_bytes`. Returns the session and its only queue.
    pub fn connect(&self, number: usize, pool_bytes: u64) -> io::Result<(Device, Queue)> {
        let options = Options {
            queues: 1,
            queue_size: self.queue_size,
            packed: Some(false),
            indirect: true,
            event_idx: true,
            pool: PoolOptions { size_bytes: pool_bytes, huge_pages: false },
            timeout: TIMEOUT,
            reconnect: Reconnect::Never,
            ..Options::new(&self.sockets[number])
        };
        let (device, queues) = Device::connect(&options).map_err(io::Error::other)?;
        let queue = queues.into_iter().next();
        Ok((device, queue.ok_or_else(|| io::Error::other("the device has no queue"))?))
    }

    /// The worker's submissions so far.
    pub fn submissions(&self) -> Submissions {
        self.server.as_ref().and_then(Server::submissions).unwrap_or_default()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Unflushed data does not matter: the disks are test files.
        let _ = self.server.take().map(|server| server.stop(TIMEOUT));
    }
}
