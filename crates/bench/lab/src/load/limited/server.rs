//! `bareblk serve` with disks that have limits; queues move and the server is replaced while clients run.
//!
//! `disks and limits → bareblk.toml → ServerProcess → Control (attach, limit) … take_over → second ServerProcess`

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use crate::experiment::SampleError;
use crate::load::server::configured::{ConfiguredServer, Sockets, quoted};
use crate::load::server::control::Control;
use crate::load::server::process::{Launch, ServerProcess, here};
use crate::stop::Stop;

/// How long the old server may take to end after a live upgrade.
const PATIENCE: Duration = Duration::from_secs(10);
/// Workers of the server.
pub(crate) const WORKERS: u32 = 2;

/// Moves a queue of the first disk to `worker`.
pub(crate) fn attach(control: &mut Control, queue: u16, worker: u32) -> io::Result<()> {
    control.tell(json!({"do": "attach", "disk": name(0), "queue": queue, "worker": worker}))
}

/// Sets the limit of the first disk.
pub(crate) fn limit_iops(control: &mut Control, iops: u64) -> io::Result<()> {
    control.tell(json!({"do": "limit", "disk": name(0), "set": {"iops": iops}}))
}

fn name(disk: usize) -> String {
    format!("lab-{disk}")
}

/// The servers of one sample. Dropping it ends them.
pub(crate) struct LimitedServer {
    /// After a live upgrade, the new server; it ends before the folder of the first is removed.
    second: Option<ServerProcess>,
    first: ConfiguredServer,
}

impl LimitedServer {
    /// Serves a disk per entry of `limits`, each with the image at the same place of `files`. An entry is a disk's
    /// further keys, `group` the keys of the group `all`.
    pub fn start(
        program: Option<&Path>,
        files: &[&Path],
        (limits, group): (&[&str], Option<&str>),
        stop: &Stop,
    ) -> Result<Self, SampleError> {
        let text = |sockets: &Sockets| text(sockets, group, files, limits);
        let first = ConfiguredServer::start(program, limits.len(), text, stop)?;
        Ok(Self { second: None, first })
    }

    pub fn sockets(&self) -> &[PathBuf] {
        &self.first.sockets.disks
    }

    pub fn control(&self) -> Result<Control, SampleError> {
        Control::connect(&self.first.sockets.control)
            .map_err(|error| SampleError::because("the control socket", &error))
    }

    /// Replaces the server by a new process without disconnecting the guests.
    pub fn take_over(&mut self, program: Option<&Path>, stop: &Stop) -> Result<(), SampleError> {
        let (config, control) = (&self.first.config, &self.first.sockets.control);
        let mut command = Command::new(here(program)?);
        command.arg("serve").arg("--config").arg(config).arg("--take-over").arg(control);
        let sockets = vec![control.clone()];
        self.second = Some(ServerProcess::launch(stop, |_| Ok(Launch { command, sockets, missing: None }))?);
        if !self.first.process.ends_within(PATIENCE) {
            return Err(SampleError::Unavailable("the old server did not end after the live upgrade".into()));
        }
        Ok(())
    }
}

/// The configuration file's text. Each disk has its image, socket and further keys.
fn text(sockets: &Sockets, group: Option<&str>, files: &[&Path], limits: &[&str]) -> io::Result<String> {
    let control = quoted(&sockets.control)?;
    let mut text = format!("control = {control}\nworkers = {WORKERS}\nbalance = \"off\"\n");
    if let Some(keys) = group {
        let _ = write!(text, "\n[[group]]\nname = \"all\"\n{keys}\n");
    }
    for (disk, ((file, socket), keys)) in files.iter().zip(&sockets.disks).zip(limits).enumerate() {
        let (name, file, socket) = (name(disk), quoted(file)?, quoted(socket)?);
        let _ = write!(
            text,
            "\n[[disk]]\nname = \"{name}\"\nimage = {file}\nsocket = {socket}\ncache = \"writeback\"\n{keys}\n"
        );
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_has_the_group_before_its_disks() {
        let sockets = Sockets { disks: vec!["/s0".into()], control: "/control".into(), ..Sockets::default() };
        let text = text(&sockets, Some("iops = 5"), &[Path::new("/a")], &["group = \"all\""]).unwrap();
        let expected = "control = \"/control\"\nworkers = 2\nbalance = \"off\"\n\n[[group]]\nname = \"all\"\niops = 5\n\n\
                        [[disk]]\nname = \"lab-0\"\nimage = \"/a\"\nsocket = \"/s0\"\ncache = \"writeback\"\ngroup = \
                        \"all\"\n";
        assert_eq!(text, expected);
    }
}
