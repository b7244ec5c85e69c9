//! Real NBD servers for tests: nbdkit and qemu-nbd, on Unix sockets.
//!
//! nbdkit ends with the thread that has started it.
#![allow(dead_code)] // each test program uses only a part

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use xtask::skip::{Reason, skip};

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);

/// An NBD server on a Unix socket, which ends with this value.
pub struct NbdServer {
    program: &'static str,
    arguments: Vec<String>,
    process: Option<Child>,
    folder: TempDir,
}

impl NbdServer {
    /// nbdkit with these arguments, after those that say where it listens. `None`: it is not installed.
    pub fn nbdkit(arguments: &[&str]) -> Option<Self> {
        let folder = folder();
        let socket = folder.path().join("nbd.sock").display().to_string();
        let own = ["--foreground", "--unix", &socket].map(str::to_owned);
        Self::new("nbdkit", folder, own.into_iter().chain(arguments.iter().map(|word| (*word).to_owned())))
    }

    /// qemu-nbd on a raw file. `None`: it is not installed.
    pub fn qemu_nbd(size_bytes: u64, arguments: &[&str]) -> Option<Self> {
        let folder = folder();
        let file = new_file(folder.path(), size_bytes);
        let socket = folder.path().join("nbd.sock").display().to_string();
        let words = ["--persistent", "--shared=0", "--format=raw", "--socket", &socket, &file];
        Self::new("qemu-nbd", folder, words.iter().chain(arguments).map(|word| (*word).to_owned()))
    }

    /// nbdkit's file plugin with these further arguments.
    pub fn file(size_bytes: u64, arguments: &[&str]) -> Option<Self> {
        let folder = folder();
        let file = new_file(folder.path(), size_bytes);
        let socket = folder.path().join("nbd.sock").display().to_string();
        let own = ["--foreground", "--unix", &socket, "file", &file].map(str::to_owned);
        Self::new("nbdkit", folder, own.into_iter().chain(arguments.iter().map(|word| (*word).to_owned())))
    }

    fn new(
        program: &'static str,
        folder: TempDir,
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

    /// The file that it exports, unless it is nbdkit with other arguments.
    pub fn file_path(&self) -> PathBuf {
        self.folder.path().join("disk.raw")
    }

    /// The URI of its default export.
    pub fn uri(&self) -> String {
        self.uri_of("")
    }

    /// The URI of this export.
    pub fn uri_of(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn new_file(folder: &Path, size_bytes: u64) -> String {
    let path = folder.join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(size_bytes).unwrap();
    path.display().to_string()
}
