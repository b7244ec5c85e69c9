//! Trouble of a disk's server: it hangs, or it is killed and started again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::experiment::SampleError;
use crate::load::server::process::{Launch, ServerProcess};
use crate::stop::Stop;

/// Tells the user how to install the NBD server.
pub(crate) const NBDKIT_MISSING: &str = "nbdkit is not installed: apt install nbdkit";

/// nbdkit with a disk in memory, on a socket that stays the same when it is started again.
pub(crate) struct Nbdkit {
    // Must be dropped before the folder.
    process: Mutex<Option<ServerProcess>>,
    socket: PathBuf,
    size_bytes: u64,
    _folder: TempDir,
}

impl Nbdkit {
    pub fn start(size_bytes: u64, stop: &Stop) -> Result<Self, SampleError> {
        let folder = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir();
        let folder = folder.map_err(|error| SampleError::because("a folder for nbdkit", &error))?;
        let socket = folder.path().join("nbd.sock");
        let own = Self { process: Mutex::new(None), socket, size_bytes, _folder: folder };
        own.start_again(stop)?;
        Ok(own)
    }

    /// Starts it, after [`Nbdkit::kill`] for example. Its disk is new.
    pub fn start_again(&self, stop: &Stop) -> Result<(), SampleError> {
        let _ = std::fs::remove_file(&self.socket);
        let process = ServerProcess::launch(stop, |_| {
            let mut command = Command::new("nbdkit");
            command.args(["--foreground", "--unix"]).arg(&self.socket);
            command.arg("memory").arg(self.size_bytes.to_string());
            Ok(Launch { command, sockets: vec![self.socket.clone()], missing: Some(NBDKIT_MISSING) })
        })?;
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
        Ok(())
    }

    /// Ends it with SIGKILL.
    pub fn kill(&self) {
        let process = self.process.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(pid) = process.as_ref().and_then(|process| pid_of(process.pid())) {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }

    /// Its process; `None`: it does not run.
    pub fn pid(&self) -> Option<Pid> {
        let process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        process.as_ref().and_then(|process| pid_of(process.pid()))
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

fn pid_of(number: u32) -> Option<Pid> {
    i32::try_from(number).ok().map(Pid::from_raw)
}

/// A process that hangs until this value is dropped.
pub(crate) struct Stopped(Pid);

impl Stopped {
    pub fn new(pid: Pid) -> Result<Self, SampleError> {
        kill(pid, Signal::SIGSTOP).map_err(|error| SampleError::because("SIGSTOP", &error))?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}
