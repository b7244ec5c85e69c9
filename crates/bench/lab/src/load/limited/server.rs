//! `bareblk serve` with disks that have limits; queues move and the server is replaced while clients run.
//!
//! `disks and limits → bareblk.toml → ServerProcess → Control (attach, limit) … take_over → second ServerProcess`

use std::fmt::Write;
use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::once_it_listens;
use crate::experiment::SampleError;
use crate::load::server::process::{Launch, ServerProcess, here};
use crate::stop::Stop;

/// Limit of the time for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Workers of the server.
pub(crate) const WORKERS: u32 = 2;

/// A connection to the server's control socket.
pub(crate) struct Control(BufReader<UnixStream>);

impl Control {
    fn connect(path: &Path) -> io::Result<Self> {
        let stream = once_it_listens(|| UnixStream::connect(path))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut control = Self(BufReader::new(stream));
        control.line()?; // the greeting
        Ok(control)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line),
        }
    }

    /// Sends a request and returns once it is done.
    fn ask(&mut self, request: &Value) -> io::Result<()> {
        self.0.get_mut().write_all(format!("{request}\n").as_bytes())?;
        let answer: Value = serde_json::from_str(&self.line()?).map_err(io::Error::other)?;
        match answer.get("ok") {
            Some(_) => Ok(()),
            None => Err(io::Error::other(answer["error"].to_string())),
        }
    }

    /// Moves a queue of the first disk to `worker`.
    pub fn attach(&mut self, queue: u16, worker: u32) -> io::Result<()> {
        self.ask(
            &serde_json::json!({"id": 1, "do": "attach", "disk": name(0), "queue": queue, "worker": worker}),
        )
    }

    /// Sets the limit of the first disk.
    pub fn limit_iops(&mut self, iops: u64) -> io::Result<()> {
        self.ask(&serde_json::json!({"id": 1, "do": "limit", "disk": name(0), "set": {"iops": iops}}))
    }
}

fn name(disk: usize) -> String {
    format!("lab-{disk}")
}

/// The servers of one sample. Dropping it ends them.
pub(crate) struct LimitedServer {
    /// After a live upgrade, the new server; it ends before the folder of the first is removed.
    second: Option<ServerProcess>,
    first: ServerProcess,
    sockets: Vec<PathBuf>,
    config: PathBuf,
    control: PathBuf,
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
        let program = here(program)?;
        let (mut sockets, mut config, mut control) = (Vec::new(), PathBuf::new(), PathBuf::new());
        let first = ServerProcess::launch(stop, |folder| {
            sockets = (0..limits.len()).map(|disk| folder.join(format!("disk-{disk}.sock"))).collect();
            (config, control) = (folder.join("bareblk.toml"), folder.join("control.sock"));
            let disks = files.iter().zip(&sockets).zip(limits);
            let text = text(&control, group, disks.map(|((file, socket), keys)| (*file, &**socket, *keys)));
            std::fs::write(&config, text)
                .map_err(|error| SampleError::because("the server's configuration", &error))?;
            let mut command = Command::new(program);
            command.arg("serve").arg("--config").arg(&config);
            let all = sockets.iter().chain([&control]).cloned().collect();
            Ok(Launch { command, sockets: all, missing: None })
        })?;
        Ok(Self { second: None, first, sockets, config, control })
    }

    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    pub fn control(&self) -> Result<Control, SampleError> {
        Control::connect(&self.control).map_err(|error| SampleError::because("the control socket", &error))
    }

    /// Replaces the server by a new process without a pause of the guests' connections.
    pub fn take_over(&mut self, program: Option<&Path>, stop: &Stop) -> Result<(), SampleError> {
        let mut command = Command::new(here(program)?);
        command.arg("serve").arg("--config").arg(&self.config).arg("--take-over").arg(&self.control);
        let sockets = vec![self.control.clone()];
        self.second = Some(ServerProcess::launch(stop, |_| Ok(Launch { command, sockets, missing: None }))?);
        if !self.first.ends_within(PATIENCE) {
            return Err(SampleError::Unavailable("the old server did not end after the live upgrade".into()));
        }
        Ok(())
    }
}

/// The configuration file's text. Each disk has its image, socket and further keys.
fn text<'a>(
    control: &Path,
    group: Option<&str>,
    disks: impl Iterator<Item = (&'a Path, &'a Path, &'a str)>,
) -> String {
    let mut text = format!("control = '{}'\nworkers = {WORKERS}\nbalance = \"off\"\n", control.display());
    if let Some(keys) = group {
        let _ = write!(text, "\n[[group]]\nname = \"all\"\n{keys}\n");
    }
    for (disk, (file, socket, keys)) in disks.enumerate() {
        let (name, file, socket) = (name(disk), file.display(), socket.display());
        let _ = write!(
            text,
            "\n[[disk]]\nname = \"{name}\"\nimage = '{file}'\nsocket = '{socket}'\ncache = \"writeback\"\n{keys}\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_has_the_group_before_its_disks() {
        let disks = [(Path::new("/a"), Path::new("/s0"), "group = \"all\"")];
        let text = text(Path::new("/control"), Some("iops = 5"), disks.into_iter());
        let expected = "control = '/control'\nworkers = 2\nbalance = \"off\"\n\n[[group]]\nname = \"all\"\niops = 5\n\n\
                        [[disk]]\nname = \"lab-0\"\nimage = '/a'\nsocket = '/s0'\ncache = \"writeback\"\ngroup = \
                        \"all\"\n";
        assert_eq!(text, expected);
    }
}
