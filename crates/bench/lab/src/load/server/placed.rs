//! `bareblk serve` with a disk per file and a configurable placement of requests.
//!
//! `Layout → bareblk.toml (a table per disk) → ServerProcess, its control socket`
//!
//! - Each worker is bound to its own core if there are enough cores, so that requests are submitted and completed where
//!   the placement specifies. Queues do not move (`balance = "off"`).
//! - Disk k's completion worker is worker k, so several disks share the work of completing.

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{Launch, ServerProcess, here};
use crate::experiment::SampleError;
use crate::load::cores;
use crate::stop::Stop;

/// Where a disk's requests are submitted and completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placing {
    /// Each worker has its own engine.
    Queue,
    /// All workers share one engine, behind a lock.
    Shared {
        /// Whether a submitting worker also takes completions; otherwise only the completion worker does.
        reap_on_submit: bool,
    },
    /// One worker has the engine; the others hand requests over to it.
    Completion {
        /// The hand-over policy, in the syntax of `--hand-over`.
        hand_over: &'static str,
        host: Host,
    },
}

/// Which worker is the completion worker, and whether it also serves queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// A different worker for each disk, which serves queues like the other workers.
    PerDisk,
    /// A different worker for each disk, which serves none of that disk's queues.
    PerDiskWithoutQueues,
    /// One worker is the completion worker of all disks.
    One,
}

impl Host {
    /// The completion worker of disk number `disk`.
    fn worker(self, disk: usize, workers: usize) -> usize {
        match self {
            Self::PerDisk | Self::PerDiskWithoutQueues => disk % workers.max(1),
            Self::One => 0,
        }
    }
}

/// A server's configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub engine: &'static str,
    pub cache: &'static str,
    pub placing: Placing,
    pub workers: usize,
    /// Queues of each disk.
    pub queues: u16,
    /// Whether a worker polls before it sleeps.
    pub polls: bool,
    /// Whether the server has a monitor socket.
    pub monitored: bool,
}

/// A running server, with a socket for each disk. Dropping this value ends the server.
#[derive(Debug)]
pub(crate) struct PlacedServer {
    process: ServerProcess,
    sockets: Vec<PathBuf>,
    control: PathBuf,
    monitor: PathBuf,
}

impl PlacedServer {
    /// Serves `files`, each as one disk. Returns once clients can connect. `program` is `bareblk`.
    pub fn start(
        layout: &Layout,
        program: Option<&Path>,
        files: &[&Path],
        stop: &Stop,
    ) -> Result<Self, SampleError> {
        let program = here(program)?;
        let (mut sockets, mut control, mut monitor) = (Vec::new(), PathBuf::new(), PathBuf::new());
        let process = ServerProcess::launch(stop, |folder| {
            sockets = (0..files.len()).map(|disk| folder.join(format!("disk-{disk}.sock"))).collect();
            control = folder.join("control.sock");
            monitor = folder.join("monitor.sock");
            let disks: Vec<_> = files.iter().copied().zip(sockets.iter().map(PathBuf::as_path)).collect();
            let config = folder.join("bareblk.toml");
            text(layout, (&control, &monitor), &disks)
                .and_then(|text| std::fs::write(&config, text))
                .map_err(|error| SampleError::because("the server's configuration", &error))?;
            let mut command = Command::new(program);
            command.arg("serve").arg("--config").arg(&config);
            let all = sockets.iter().chain([&control]).cloned().collect();
            Ok(Launch { command, sockets: all, missing: None })
        })?;
        Ok(Self { process, sockets, control, monitor })
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Size of the server's log.
    pub fn log_bytes(&self) -> u64 {
        self.process.log_bytes()
    }

    /// One socket per file, in the files' order.
    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    pub fn control(&self) -> &Path {
        &self.control
    }

    /// The monitor socket, if the layout has one.
    pub fn monitor(&self) -> &Path {
        &self.monitor
    }
}

/// The configuration file's text.
fn text(layout: &Layout, (control, monitor): (&Path, &Path), disks: &[(&Path, &Path)]) -> io::Result<String> {
    let cpus: Vec<_> =
        (0..layout.workers.min(cores::all().len())).map(|at| cores::at(at).to_string()).collect();
    let mut text = format!(
        "control = {}\nworkers = {}\ncpus = \"{}\"\nbalance = \"off\"\n",
        quoted(control)?,
        layout.workers,
        cpus.join(",")
    );
    if layout.monitored {
        let _ = writeln!(text, "monitor = {}", quoted(monitor)?);
    }
    if !layout.polls {
        text.push_str("poll-us = 0\n");
    }
    for (disk, (file, socket)) in disks.iter().enumerate() {
        let _ = write!(
            text,
            "\n[[disk]]\nname = \"lab-{disk}\"\nimage = {}\nsocket = {}\nqueues = {}\nengine = \"{}\"\ncache = \"{}\"\n",
            quoted(file)?,
            quoted(socket)?,
            layout.queues,
            layout.engine,
            layout.cache
        );
        text.push_str(&placing(layout, disk));
    }
    Ok(text)
}

/// The keys of the configuration file for a disk's placement.
fn placing(layout: &Layout, disk: usize) -> String {
    match layout.placing {
        Placing::Queue => String::new(),
        Placing::Shared { reap_on_submit } => {
            let host = Host::PerDisk.worker(disk, layout.workers);
            format!(
                "placement = \"shared\"\nno-reap-on-submit = {}\ncompletion-worker = {host}\n",
                !reap_on_submit
            )
        }
        Placing::Completion { hand_over, host: how } => {
            let host = how.worker(disk, layout.workers);
            let keys = format!(
                "placement = \"completion\"\nhand-over = \"{hand_over}\"\ncompletion-worker = {host}\n"
            );
            if how != Host::PerDiskWithoutQueues {
                return keys;
            }
            let others =
                (0..layout.workers).filter(|&worker| worker != host).map(|worker| worker.to_string());
            format!("{keys}workers = [{}]\n", others.collect::<Vec<_>>().join(", "))
        }
    }
}

/// Formats a TOML string as JSON, because JSON strings are valid TOML strings.
fn quoted(path: &Path) -> io::Result<String> {
    let text = path.to_str().ok_or_else(|| {
        let text =
            format!("{path:?} is not UTF-8, so it cannot be in a configuration file: use another folder");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    serde_json::to_string(text).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(placing: Placing) -> String {
        let layout = Layout {
            engine: "io_uring",
            cache: "none",
            placing,
            workers: 3,
            queues: 4,
            polls: false,
            monitored: false,
        };
        let disks = [(Path::new("/a\"b"), Path::new("/s0")), (Path::new("/c"), Path::new("/s1"))];
        text(&layout, (Path::new("/control"), Path::new("/monitor")), &disks).unwrap()
    }

    #[test]
    fn disk_of_the_usual_placement_has_no_keys_for_it() {
        let text = of(Placing::Queue);
        assert!(text.starts_with("control = \"/control\"\nworkers = 3\ncpus = \""), "{text}");
        assert!(text.contains("balance = \"off\"\npoll-us = 0\n") && !text.contains("placement"), "{text}");
        assert!(!text.contains("monitor"), "{text}");
        assert!(
            text.contains("image = \"/a\\\"b\"\nsocket = \"/s0\"\nqueues = 4\nengine = \"io_uring\""),
            "{text}"
        );
    }

    #[test]
    fn each_disk_has_a_completion_worker_of_its_own() {
        let text = of(Placing::Shared { reap_on_submit: false });
        assert!(text.contains("no-reap-on-submit = true\ncompletion-worker = 0\n"), "{text}");
        assert!(text.contains("no-reap-on-submit = true\ncompletion-worker = 1\n"), "{text}");
    }

    #[test]
    fn completion_worker_without_queues_is_not_among_those_that_serve_the_disk() {
        let text = of(Placing::Completion { hand_over: "count:4", host: Host::PerDiskWithoutQueues });
        assert!(
            text.contains("hand-over = \"count:4\"\ncompletion-worker = 1\nworkers = [0, 2]\n"),
            "{text}"
        );
        let one = of(Placing::Completion { hand_over: "adaptive", host: Host::One });
        assert_eq!(one.matches("completion-worker = 0\n").count(), 2, "{one}");
    }
}
