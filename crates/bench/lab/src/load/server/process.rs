//! Runs a vhost-user-blk server as a separate process: `bareblk serve`, or qemu-storage-daemon if installed.
//!
//! `spawn → its socket exists → load → SIGTERM → ended`
//!
//! - As in real use, the server is a separate process. The kernel therefore counts its CPU time and context switches
//!   separately.
//! - The server runs in its own process group, so a terminal's Ctrl-C reaches only this program, which then ends the
//!   server.
//! - The server does not outlive this program, even if this program is killed (a second Ctrl-C): a shell that reads
//!   from a pipe notices that the pipe was closed, and ends the server.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::experiment::SampleError;
use crate::stop::Stop;

/// The server that bareblk is compared with.
const PEER: &str = "qemu-storage-daemon";
/// Tells the user how to install that server.
pub(crate) const PEER_MISSING: &str =
    "qemu-storage-daemon is not installed: apt install qemu-system-common (Debian 12) or qemu-utils (13)";
/// How long to wait for the socket, and for the process to end.
const PATIENCE: Duration = Duration::from_secs(20);
/// Name of the log file in the server's folder.
const SAID: &str = "said";
/// Time between two checks for the sockets or the end of the process.
const LOOK: Duration = Duration::from_millis(2);

/// Connects to a server's socket. The server may have created the socket and not listen on it yet.
pub(crate) fn once_it_listens<T, E>(connect: impl Fn() -> Result<T, E>) -> Result<T, E> {
    let end = Instant::now() + PATIENCE;
    loop {
        match connect() {
            Err(_) if Instant::now() < end => std::thread::sleep(LOOK),
            done => return done,
        }
    }
}

/// The server program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `bareblk serve`.
    Own {
        engine: &'static str,
        cache: &'static str,
        workers: u16,
        /// Whether the server's worker polls.
        polls: bool,
    },
    /// qemu-storage-daemon, with one thread for all queues, io_uring and O_DIRECT.
    Peer,
}

impl Kind {
    /// Number of threads that serve queues.
    pub fn workers(self) -> usize {
        match self {
            Self::Own { workers, .. } => workers.into(),
            Self::Peer => 1,
        }
    }
}

/// What a server serves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Storage<'s> {
    File(&'s Path),
    /// An image whose backing files are in a folder.
    Qcow2 {
        path: &'s Path,
        backing_folder: &'s Path,
    },
    /// An image, as `POOL/IMAGE`, in the Ceph cluster with this configuration file.
    Rbd {
        pool: &'s str,
        image: &'s str,
        conf: &'s Path,
    },
    /// The default export of the NBD server on this Unix socket.
    Nbd(&'s Path),
}

/// The server process. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    /// Must be dropped first, so that the keeper never signals a process id that may have been reused.
    keeper: Option<Keeper>,
    socket: PathBuf,
    folder: TempDir,
}

/// How to start a server: its command, and the sockets that exist once it is ready.
pub(crate) struct Launch {
    pub command: Command,
    /// At least one. Clients that use only one socket use the first.
    pub sockets: Vec<PathBuf>,
    /// The reason why the program is missing, if it is.
    pub missing: Option<&'static str>,
}

/// A shell that ends a process when this program has ended: this program holds the shell's standard input open.
#[derive(Debug)]
pub(crate) struct Keeper(Child);

impl Keeper {
    /// # Errors
    /// If the shell cannot be started.
    pub fn of(pid: u32) -> std::io::Result<Self> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "read -r nothing; kill -TERM \"$0\"", &pid.to_string()]);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(shell.process_group(0).spawn()?))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Killed before its input closes, so that it signals no process.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The peer's version, such as "qemu-storage-daemon 7.2.22"; `None` if it is not installed.
pub(crate) fn peer_version() -> Option<String> {
    let output = Command::new(PEER).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.lines().next().filter(|_| output.status.success())?;
    Some(line.replacen(" version ", " ", 1))
}

impl ServerProcess {
    /// Serves `storage` as a disk with up to `queues` queues. Returns once clients can connect. `program` is `bareblk`.
    pub fn start(
        kind: Kind,
        program: Option<&Path>,
        storage: Storage<'_>,
        queues: u16,
        stop: &Stop,
    ) -> Result<Self, SampleError> {
        Self::launch(stop, |folder| {
            let socket = folder.join("disk.sock");
            let (command, missing) = match kind {
                Kind::Own { .. } => (own(here(program)?, kind, storage, &socket, queues), None),
                Kind::Peer => (peer(storage, &socket, queues), Some(PEER_MISSING)),
            };
            Ok(Launch { command, sockets: vec![socket], missing })
        })
    }

    /// Starts the server that `make` describes for a directory of sockets, and returns once clients can connect. The
    /// directory is removed when the server ends.
    pub fn launch(
        stop: &Stop,
        make: impl FnOnce(&Path) -> Result<Launch, SampleError>,
    ) -> Result<Self, SampleError> {
        let failed = |error: &dyn std::fmt::Display| SampleError::because("the server", error);
        let folder =
            tempfile::Builder::new().prefix(".bareblk-lab-").tempdir().map_err(|error| failed(&error))?;
        let said = folder.path().join(SAID);
        let Launch { mut command, sockets, missing } = make(folder.path())?;
        let log = File::create(&said).map_err(|error| failed(&error))?;
        // The user's RUST_LOG would make this server log more or less, and distort the measurement.
        command.env_remove("RUST_LOG");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0).spawn();
        let child = child.map_err(|error| match missing {
            Some(why) if error.kind() == std::io::ErrorKind::NotFound => {
                SampleError::Unavailable(why.to_owned())
            }
            _ => failed(&error),
        })?;
        let first = sockets.first().cloned().unwrap_or_default();
        let mut started = Self { child, keeper: None, socket: first, folder };
        started.keeper = Some(Keeper::of(started.pid()).map_err(|error| failed(&error))?);
        started.wait_for(&sockets, &said, stop)?;
        Ok(started)
    }

    fn wait_for(&mut self, sockets: &[PathBuf], said: &Path, stop: &Stop) -> Result<(), SampleError> {
        let end = Instant::now() + PATIENCE;
        while !sockets.iter().all(|socket| socket.exists()) {
            if stop.is_asked() {
                return Err(SampleError::Interrupted);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                let text = std::fs::read_to_string(said).unwrap_or_default();
                let line = text.lines().last().unwrap_or("no message").to_owned();
                return Err(SampleError::because(&format!("the server ended with {status}"), &line));
            }
            if Instant::now() > end {
                let why = format!("the server created no socket within {} s", PATIENCE.as_secs());
                return Err(SampleError::Unavailable(why));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process has ended by itself. Returns false if it still runs after `patience`.
    pub fn ends_within(&mut self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < end => std::thread::sleep(LOOK),
                ended => {
                    // The process id is free now.
                    self.keeper = None;
                    return matches!(ended, Ok(Some(_)));
                }
            }
        }
    }

    /// Size of the server's log.
    pub fn log_bytes(&self) -> u64 {
        std::fs::metadata(self.folder.path().join(SAID)).map_or(0, |said| said.len())
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.keeper = None;
        let pid = i32::try_from(self.child.id()).unwrap_or(i32::MAX);
        let end = Instant::now() + PATIENCE;
        // A process that was already waited for is not signalled, because its id may have been reused.
        let runs = matches!(self.child.try_wait(), Ok(None));
        if runs && kill(Pid::from_raw(pid), Signal::SIGTERM).is_ok() {
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(LOOK);
            }
        }
        // Neither call does anything if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The path of `bareblk`, or an error if it is not known.
pub(crate) fn here(program: Option<&Path>) -> Result<&Path, SampleError> {
    program.ok_or_else(|| SampleError::because("the server", &"the path of bareblk is unknown"))
}

fn own(program: &Path, kind: Kind, storage: Storage<'_>, socket: &Path, queues: u16) -> Command {
    let mut command = Command::new(program);
    command.arg("serve");
    match storage {
        Storage::File(path) => command.arg(path),
        Storage::Qcow2 { path, backing_folder } => {
            command.arg(path).args(["--format", "qcow2", "--backing-folders"]).arg(backing_folder)
        }
        Storage::Rbd { pool, image, conf } => {
            command.arg(format!("rbd:{pool}/{image}")).arg("--rbd-conf").arg(conf)
        }
        Storage::Nbd(socket) => command.arg(format!("nbd+unix:///?socket={}", socket.display())),
    };
    command.arg("--socket").arg(socket).args(["--queues", &queues.to_string()]);
    if let Kind::Own { engine, cache, workers, polls } = kind {
        command.args(["--engine", engine, "--cache", cache]);
        if workers > 1 {
            command.args(["--workers", &workers.to_string()]);
        }
        if !polls {
            command.args(["--poll-us", "0"]);
        }
    }
    command
}

fn peer(storage: Storage<'_>, socket: &Path, queues: u16) -> Command {
    // In the options, a comma ends a value.
    let quoted = |path: &Path| path.display().to_string().replace(',', ",,");
    let driver = match storage {
        Storage::File(path) | Storage::Qcow2 { path, .. } => {
            format!("file,filename={},aio=io_uring", quoted(path))
        }
        Storage::Rbd { pool, image, conf } => format!("rbd,pool={pool},image={image},conf={}", quoted(conf)),
        Storage::Nbd(socket) => format!("nbd,server.type=unix,server.path={}", quoted(socket)),
    };
    let socket = quoted(socket);
    let mut command = Command::new(PEER);
    command.args(["--blockdev", &format!("driver={driver},node-name=f0,cache.direct=on")]);
    let format = if matches!(storage, Storage::Qcow2 { .. }) { "qcow2,cache.direct=on" } else { "raw" };
    let format = format!("driver={format},node-name=d0,file=f0");
    command.args(["--blockdev", &format, "--object", "iothread,id=io0"]);
    let export = "type=vhost-user-blk,id=e0,node-name=d0,writable=on,iothread=io0,addr.type=unix";
    command.args(["--export", &format!("{export},addr.path={socket},num-queues={queues}")]);
    command
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn line(command: &Command) -> String {
        command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn server_is_told_engine_cache_and_workers() {
        let kind = Kind::Own { engine: "mmap", cache: "writeback", workers: 2, polls: false };
        let found =
            line(&own(Path::new("bareblk"), kind, Storage::File(Path::new("/f")), Path::new("/s"), 4));
        let expected =
            "serve /f --socket /s --queues 4 --engine mmap --cache writeback --workers 2 --poll-us 0";
        assert_eq!(found, expected);
    }

    #[test]
    fn commas_in_paths_do_not_end_the_peers_options() {
        let found = line(&peer(Storage::File(Path::new("/a,b")), Path::new("/s"), 2));
        assert!(found.contains("filename=/a,,b,aio=io_uring,") && found.ends_with("num-queues=2"), "{found}");
    }

    #[test]
    fn remote_disks_are_named_as_each_program_expects_them() {
        let kind = Kind::Own { engine: "auto", cache: "none", workers: 1, polls: true };
        let rbd = Storage::Rbd { pool: "rbd", image: "disk", conf: Path::new("/c") };
        let (program, socket) = (Path::new("bareblk"), Path::new("/s"));
        let found = line(&own(program, kind, rbd, socket, 1));
        assert!(found.starts_with("serve rbd:rbd/disk --rbd-conf /c --socket /s"), "{found}");
        let found = line(&peer(rbd, socket, 1));
        assert!(found.contains("driver=rbd,pool=rbd,image=disk,conf=/c,"), "{found}");
        let nbd = Storage::Nbd(Path::new("/n"));
        let found = line(&own(program, kind, nbd, socket, 1));
        assert!(found.starts_with("serve nbd+unix:///?socket=/n --socket /s"), "{found}");
        let found = line(&peer(nbd, socket, 1));
        assert!(found.contains("driver=nbd,server.type=unix,server.path=/n,"), "{found}");
    }

    #[test]
    fn server_that_ends_at_once_is_reported_with_its_words() {
        let kind = Kind::Own { engine: "mmap", cache: "writeback", workers: 1, polls: true };
        // `ls` rejects these arguments.
        let program = Path::new("/bin/ls");
        let error =
            ServerProcess::start(kind, Some(program), Storage::File(Path::new("/f")), 1, &Stop::default())
                .unwrap_err();
        assert!(error.to_string().starts_with("the server ended with exit status"), "{error}");
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn process_ends_when_its_parent_is_gone() {
        let mut sleeper = sleeper();
        let mut keeper = Keeper::of(sleeper.id()).unwrap();
        // The kernel closes the pipe in the same way when a process is killed.
        drop(keeper.0.stdin.take());
        assert_eq!(sleeper.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
    }

    #[test]
    fn process_whose_keeper_is_let_go_goes_on() {
        let mut sleeper = sleeper();
        drop(Keeper::of(sleeper.id()).unwrap());
        assert!(sleeper.try_wait().unwrap().is_none());
        sleeper.kill().unwrap();
        assert_eq!(sleeper.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    }
}
