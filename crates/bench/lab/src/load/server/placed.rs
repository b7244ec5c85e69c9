//! `bareblk serve` with a disk per file and a configurable placement of requests.
//!
//! `Layout → bareblk.toml (a table per disk) → ConfiguredServer`
//!
//! - Each worker is bound to its own core if there are enough cores, so that requests are submitted and completed where
//!   the placement specifies. Queues do not move (`balance = "off"`).
//! - Disk k's completion worker is worker k, so several disks share the work of completing.

use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use super::configured::{ConfiguredServer, Sockets, quoted};
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

/// A running server, with a socket for each disk. Dropping it ends the server.
#[derive(Debug)]
pub(crate) struct PlacedServer(ConfiguredServer);

impl PlacedServer {
    /// Serves `files`, each as one disk. Returns once clients can connect. `program` is `bareblk`.
    pub fn start(
        layout: &Layout,
        program: Option<&Path>,
        files: &[&Path],
        stop: &Stop,
    ) -> Result<Self, SampleError> {
        ConfiguredServer::start(program, files.len(), |sockets| text(layout, sockets, files), stop).map(Self)
    }

    pub fn pid(&self) -> u32 {
        self.0.process.pid()
    }

    /// Size of the server's log.
    pub fn log_bytes(&self) -> u64 {
        self.0.process.log_bytes()
    }

    /// One socket per file, in the files' order.
    pub fn sockets(&self) -> &[PathBuf] {
        &self.0.sockets.disks
    }

    pub fn control(&self) -> &Path {
        &self.0.sockets.control
    }

    /// The monitor socket, if the layout has one.
    pub fn monitor(&self) -> &Path {
        &self.0.sockets.monitor
    }
}

/// The configuration file's text.
fn text(layout: &Layout, sockets: &Sockets, files: &[&Path]) -> io::Result<String> {
    let cpus: Vec<_> =
        (0..layout.workers.min(cores::all().len())).map(|at| cores::at(at).to_string()).collect();
    let mut text = format!(
        "control = {}\nworkers = {}\ncpus = \"{}\"\nbalance = \"off\"\n",
        quoted(&sockets.control)?,
        layout.workers,
        cpus.join(",")
    );
    if layout.monitored {
        let _ = writeln!(text, "monitor = {}", quoted(&sockets.monitor)?);
    }
    if !layout.polls {
        text.push_str("poll-us = 0\n");
    }
    for (disk, (file, socket)) in files.iter().zip(&sockets.disks).enumerate() {
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
        let sockets = Sockets {
            disks: vec!["/s0".into(), "/s1".into()],
            control: "/control".into(),
            monitor: "/monitor".into(),
        };
        text(&layout, &sockets, &[Path::new("/a\"b"), Path::new("/c")]).unwrap()
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
