//! Real NBD servers for tests: nbdkit and qemu-nbd, on Unix sockets, and nbdkit on a TCP port.
//!
//! nbdkit ends with the thread that has started it.
#![allow(dead_code)] // each test program uses only a part

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use xtask::skip::{Reason, skip};

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);

/// An NBD server, which ends with this value.
pub struct NbdServer {
    program: &'static str,
    arguments: Vec<String>,
    /// Its TCP port; `None`: it has a Unix socket.
    port: Option<u16>,
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

    /// nbdkit's file plugin on a TCP port of this host.
    pub fn file_over_tcp(size_bytes: u64, arguments: &[&str]) -> Option<Self> {
        let folder = folder();
        let file = new_file(folder.path(), size_bytes);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let own = ["--foreground", "--ipaddr=127.0.0.1", &format!("--port={port}"), "file", &file];
        let arguments = own.iter().chain(arguments).map(|word| (*word).to_owned()).collect();
        let server = Self { program: "nbdkit", arguments, port: Some(port), process: None, folder };
        server.started()
    }

    fn new(
        program: &'static str,
        folder: TempDir,
        arguments: impl IntoIterator<Item = String>,
    ) -> Option<Self> {
        let arguments = arguments.into_iter().collect();
        Self { program, arguments, port: None, process: None, folder }.started()
    }

    fn started(mut self) -> Option<Self> {
        if self.start().is_err() {
            skip(Reason::NoProgram(self.program.to_owned()), "");
            return None;
        }
        Some(self)
    }

    /// Replaces one argument, for the next start.
    pub fn replace_argument(&mut self, old: &str, new: &str) {
        let found = self.arguments.iter_mut().find(|argument| *argument == old);
        new.clone_into(found.unwrap());
    }

    /// Starts the server, and waits until it listens.
    pub fn start(&mut self) -> std::io::Result<()> {
        let _ = std::fs::remove_file(self.socket());
        let command = &mut Command::new(self.program);
        let process = command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        self.process = Some(process);
        let deadline = Instant::now() + PATIENCE;
        while !self.listens() {
            assert!(Instant::now() < deadline, "{} {:?} does not listen", self.program, self.arguments);
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn listens(&self) -> bool {
        self.port.map_or_else(
            || UnixStream::connect(self.socket()).is_ok(),
            |port| TcpStream::connect(("127.0.0.1", port)).is_ok(),
        )
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

    pub fn port(&self) -> u16 {
        self.port.unwrap()
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
