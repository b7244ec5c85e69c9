//! The engine for exports of NBD servers, on real servers: nbdkit and qemu-nbd.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{Image, ImageOptions, Location};
use io_engine::{Engine, EngineConfig, NbdEngine};
use nbd_client::HostDialer;
use xtask::skip::{Reason, skip};

use crate::bed::{Bed, IMAGE_BYTES, Storage, config, ram_folder, start};

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);

/// An NBD server on a Unix socket, which ends with this value.
pub struct NbdServer {
    program: &'static str,
    arguments: Vec<String>,
    process: Option<Child>,
    folder: tempfile::TempDir,
}

impl NbdServer {
    /// nbdkit with these arguments, after those that say where it listens. `None`: it is not installed.
    pub fn nbdkit(arguments: &[&str]) -> Option<Self> {
        let folder = ram_folder();
        let socket = folder.path().join("nbd.sock").display().to_string();
        let own = ["--foreground", "--unix", &socket].map(str::to_owned);
        Self::new("nbdkit", folder, own.into_iter().chain(arguments.iter().map(|word| (*word).to_owned())))
    }

    /// qemu-nbd on a raw file. `None`: it is not installed.
    pub fn qemu_nbd() -> Option<Self> {
        let folder = ram_folder();
        let file = new_file(folder.path());
        let socket = folder.path().join("nbd.sock").display().to_string();
        let words = ["--persistent", "--shared=0", "--format=raw", "--socket", &socket, &file];
        Self::new("qemu-nbd", folder, words.map(str::to_owned))
    }

    /// nbdkit's file plugin with these further arguments.
    pub fn file(arguments: &[&str]) -> Option<Self> {
        let folder = ram_folder();
        let file = new_file(folder.path());
        let socket = folder.path().join("nbd.sock").display().to_string();
        let own = ["--foreground", "--unix", &socket, "file", &file].map(str::to_owned);
        Self::new("nbdkit", folder, own.into_iter().chain(arguments.iter().map(|word| (*word).to_owned())))
    }

    fn new(
        program: &'static str,
        folder: tempfile::TempDir,
        arguments: impl IntoIterator<Item = String>,
    ) -> Option<Self> {
        let mut server = Self { program, arguments: arguments.into_iter().collect(), process: None, folder };
        if server.start().is_err() {
            skip(Reason::NoProgram(program.to_owned()), "");
            return None;
        }
        Some(server)
    }

    /// Starts the server, and waits until it listens.
    pub fn start(&mut self) -> std::io::Result<()> {
        let _ = std::fs::remove_file(self.socket());
        let command = &mut Command::new(self.program);
        let process = command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        self.process = Some(process);
        let deadline = Instant::now() + PATIENCE;
        while std::os::unix::net::UnixStream::connect(self.socket()).is_err() {
            assert!(Instant::now() < deadline, "{} {:?} does not listen", self.program, self.arguments);
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the server at once, as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub fn process(&self) -> &Child {
        self.process.as_ref().unwrap()
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    /// Options for its default export.
    pub fn options(&self) -> ImageOptions {
        let uri = format!("nbd+unix:///?socket={}", self.socket().display());
        let location = Location::parse(Path::new(&uri)).unwrap();
        ImageOptions { location, ..ImageOptions::new(uri) }
    }

    /// Opens its default export.
    pub fn image(&self, options: &ImageOptions) -> Arc<Image> {
        let Location::Nbd(uri) = &options.location else { panic!("{options:?}") };
        Arc::new(Image::open_export(Arc::new(HostDialer), uri, options).unwrap())
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn new_file(folder: &Path) -> String {
    let path = folder.join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(IMAGE_BYTES).unwrap();
    path.display().to_string()
}

pub fn engine() -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    (Box::new(NbdEngine::new(&config).unwrap()), config)
}

fn on(server: Option<NbdServer>) -> Option<Bed> {
    let server = server?;
    let image = server.image(&server.options());
    Some(start(engine(), image, Storage::Server { _server: server }, None))
}

pub fn nbd_memory() -> Option<Bed> {
    on(NbdServer::nbdkit(&["memory", "16M"]))
}

pub fn nbd_file() -> Option<Bed> {
    on(NbdServer::file(&[]))
}

pub fn nbd_one_connection() -> Option<Bed> {
    on(NbdServer::file(&["--filter=multi-conn", "multi-conn-mode=disable"]))
}

pub fn nbd_without_fua() -> Option<Bed> {
    on(NbdServer::file(&["--filter=fua"]))
}

pub fn nbd_qemu() -> Option<Bed> {
    on(NbdServer::qemu_nbd())
}
