//! `bareblk serve` with a configuration file, and its sockets in a folder of its own.
//!
//! `Sockets → the caller's bareblk.toml → ServerProcess → its control socket greets`

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::control::Control;
use super::process::{Launch, ServerProcess, here};
use crate::experiment::SampleError;
use crate::stop::Stop;

/// The paths of a server's sockets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sockets {
    /// One per disk.
    pub disks: Vec<PathBuf>,
    pub control: PathBuf,
    /// Used only if the configuration names it.
    pub monitor: PathBuf,
}

/// A running server. Dropping it ends the server.
#[derive(Debug)]
pub(crate) struct ConfiguredServer {
    pub process: ServerProcess,
    pub sockets: Sockets,
    /// The configuration file.
    pub config: PathBuf,
}

impl ConfiguredServer {
    /// Serves the disks of the configuration that `text` makes. Returns once clients can connect. `program` is
    /// `bareblk`.
    pub fn start(
        program: Option<&Path>,
        disks: usize,
        text: impl FnOnce(&Sockets) -> io::Result<String>,
        stop: &Stop,
    ) -> Result<Self, SampleError> {
        let program = here(program)?;
        let (mut sockets, mut config) = (Sockets::default(), PathBuf::new());
        let process = ServerProcess::launch(stop, |folder| {
            sockets = Sockets {
                disks: (0..disks).map(|disk| folder.join(format!("disk-{disk}.sock"))).collect(),
                control: folder.join("control.sock"),
                monitor: folder.join("monitor.sock"),
            };
            config = folder.join("bareblk.toml");
            text(&sockets)
                .and_then(|text| std::fs::write(&config, text))
                .map_err(|error| SampleError::because("the server's configuration", &error))?;
            let mut command = Command::new(program);
            command.arg("serve").arg("--config").arg(&config);
            let all = sockets.disks.iter().chain([&sockets.control]).cloned().collect();
            Ok(Launch { command, sockets: all, missing: None })
        })?;
        Control::connect_when_ready(&sockets.control)
            .map_err(|error| SampleError::because("the control socket", &error))?;
        Ok(Self { process, sockets, config })
    }
}

/// Formats a TOML string as JSON, because JSON strings are valid TOML strings.
pub(crate) fn quoted(path: &Path) -> io::Result<String> {
    let text = path.to_str().ok_or_else(|| {
        let text =
            format!("{path:?} is not UTF-8, so it cannot be in a configuration file: use another folder");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    serde_json::to_string(text).map_err(io::Error::other)
}
