//! The subcommands and options of `bareblk ctl`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::MAX_QUEUES;
use clap::{Args, Subcommand};
use serde_json::Value;

use crate::args::values::{NewSize, new_size, number, size_bytes};
use crate::args::worker_args::WorkerArgs;
use crate::control::limits::MAX_TIMEOUT_MS;

/// The default path of a control socket.
pub const DEFAULT_SOCKET: &str = "/run/bareblk/control.sock";
/// The environment variable that replaces the default path.
pub const SOCKET_VARIABLE: &str = "BAREBLK_CONTROL";

const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

pub const EXAMPLES: &str = "\
Examples:
  bareblk serve disk.raw --socket /run/vm1.sock --control /run/bareblk/control.sock
      a server that ctl can inspect and change
  bareblk ctl list
  bareblk ctl stats data --watch 1
      IOPS, MB/s, latencies and processor time of one disk, every second
  bareblk ctl workers add --cpus 2,3
  bareblk ctl attach data 0 1
      moves the disk's queue 0 to worker 1
  bareblk ctl placement data --completion-worker 1
      for a disk with --placement completion or shared
  bareblk ctl add name=data image=/images/data.raw socket=/run/vm1-data.sock queues=4
      adds a disk; the settings are the keys of a [[disk]] table in bareblk.toml
  bareblk ctl resize data 40G
  bareblk ctl resize data +10G
  bareblk ctl resume data
      retries parked requests, once the image's file system has space again
  bareblk ctl limit
      all limits, their use and their credit
  bareblk ctl limit data iops=5000 bps=200M
  bareblk ctl limit --group acme iops=off
  bareblk ctl pause data -- cp data.raw copy.raw
      copies an image while its guest waits, for at most 60 s
  bareblk ctl snapshot root=/images/root.snap data=/images/data.snap
      both disks as of one instant
  bareblk ctl snapshot --overlay root=/images/root-2.qcow2
      the guest goes on in a new qcow2 image
  bareblk ctl commit root --wait
      merges that image into its backing file, while the guest runs
  bareblk ctl stream root --rate 100M
      copies all backing files into the image, at most 100 MiB/s
  bareblk ctl reclaim root --wait
      frees the clusters that a killed server has leaked, while the guest runs
  bareblk ctl health && echo well
  bareblk ctl remove data
  bareblk ctl stats --json | jq .ok.workers

Disks:
  Give the name from the file or --name. A disk without a name goes by its image's path: the
  last parts of the path are enough, such as root.raw, if no other disk's name ends like this.

Permissions:
  Only root and the user who runs the server may connect. The protocol: docs/reference/control.md.

Environment:
  BAREBLK_CONTROL  the server's control socket, instead of --control

Exit codes: 0 done, 1 an error (one line on standard error), 2 wrong usage";

#[derive(Debug, Args)]
pub struct CtlArgs {
    /// The server's control socket [default: $BAREBLK_CONTROL, or /run/bareblk/control.sock]
    #[arg(long, alias = "socket", value_name = "PATH", global = true)]
    pub control: Option<PathBuf>,

    /// Print the server's answer, or the error, as one line of JSON
    #[arg(long, global = true)]
    pub json: bool,

    #[command(subcommand)]
    pub command: CtlCommand,
}

impl CtlArgs {
    /// The path from the option, else from the environment, else the default.
    pub fn socket(&self) -> PathBuf {
        socket(self.control.as_deref())
    }
}

/// The given path, else the one from the environment, else the default.
pub fn socket(given: Option<&Path>) -> PathBuf {
    let variable = || std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    given.map(Path::to_owned).or_else(variable).unwrap_or_else(|| DEFAULT_SOCKET.into())
}

#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// List the disks: images, sockets, sizes, connected front-ends
    List,
    /// Show the counters and latencies of disks, queues and workers
    Stats {
        /// Show only these disks
        #[arg(value_name = "DISK")]
        disks: Vec<String>,
        /// Repeat every SECONDS seconds, such as 0.5, and show rates
        #[arg(long, value_name = "SECONDS", value_parser = pause)]
        watch: Option<Duration>,
    },
    /// Show a disk's latest slow requests (--slow-ms)
    Slow {
        /// The disk's name
        disk: String,
    },
    /// List, add or remove workers
    Workers {
        #[command(subcommand)]
        command: Option<WorkersCommand>,
    },
    /// Move a disk's queue to a worker; safe while guests do I/O
    Attach {
        /// The disk's name, or the end of its image's path; from `bareblk ctl list`
        disk: String,
        /// The queue's number, from 0
        #[arg(value_parser = number("the number of a queue,", 0..=MAX_QUEUES - 1))]
        queue: u16,
        /// The worker's number, from `bareblk ctl workers`
        #[arg(value_parser = worker)]
        worker: u32,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Show a disk's placement, or choose its completion worker; safe while guests do I/O
    Placement {
        /// The disk's name
        disk: String,
        /// The worker that handles the disk's completions from now on; none: let the workers choose
        #[arg(long, value_name = "N|none", value_parser = choice)]
        completion_worker: Option<Choice>,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Add a disk
    Add {
        /// Keys of a disk's table in bareblk.toml: name=data image=data.raw socket=data.sock readonly=true
        #[arg(value_name = "KEY=VALUE", required = true, value_parser = setting)]
        settings: Vec<(String, Value)>,
    },
    /// Remove a disk: flush its image and remove its socket
    Remove {
        /// The disk's name
        disk: String,
        /// Remove the disk even if a front-end is connected
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Resize a disk and notify its guest
    Resize {
        /// The disk's name
        disk: String,
        /// The new size (K, M, G, T: powers of 1024), or +SIZE to enlarge the disk by that much
        #[arg(value_parser = new_size)]
        size: NewSize,
        /// Allow a smaller size; the data beyond the new end is lost
        #[arg(long)]
        force: bool,
    },
    /// Retry a disk's parked requests (--on-error hold)
    Resume {
        /// The disk's name
        disk: String,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Show IOPS and bandwidth limits with their use, or change them immediately
    Limit {
        /// The disk's name, and limits to change, named as in the configuration file; off removes a limit: data
        /// iops=5000 bps=off
        #[arg(value_name = "DISK|KEY=VALUE")]
        words: Vec<String>,
        /// Show or change this group's limits instead of a disk's
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
    },
    /// Show everything about one disk: settings, sessions, queues, counters
    Show {
        /// The disk's name
        disk: String,
    },
    /// Check that every worker responds and no disk has failed; otherwise the exit code is 1
    Health {
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Make all completed writes of a disk durable
    Flush {
        /// The disk's name
        disk: String,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Pause a disk: finish its requests, flush it, run a command, continue; the guest waits for at most 60 s
    Pause {
        /// The disk's name
        disk: String,
        #[command(flatten)]
        timeout: Timeout,
        /// Command to run while the disk is paused; without a command, the pause lasts until the next line, or the end,
        /// of standard input
        #[arg(last = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Keep the images of disks as they are at one instant, without copying data: by clones (XFS, btrfs), or by overlays
    Snapshot {
        /// A disk and a new file: for its clone, on the same file system as the disk's image, or for its overlay
        #[arg(value_name = "DISK=FILE", required = true, value_parser = snapshot_file)]
        files: Vec<(String, PathBuf)>,
        /// The guest goes on in FILE, a new qcow2 image over the present one, which does not change any more
        #[arg(long)]
        overlay: bool,
        #[command(flatten)]
        timeout: Timeout,
    },
    /// Copy the data of all backing files into a disk's qcow2 image, which then needs none
    Stream {
        #[command(flatten)]
        job: JobArgs,
    },
    /// Commit a disk's qcow2 image to its backing file, and switch the guest to that file; overwrites the snapshot
    Commit {
        #[command(flatten)]
        job: JobArgs,
    },
    /// Free the leaked clusters of a disk's qcow2 image, which a killed server has left
    Reclaim {
        /// The disk's name
        disk: String,
        /// Wait until the job has ended, and say what it has freed; Ctrl-C does not stop the job. Without --wait, exit code 0
        /// only means that the job has started
        #[arg(long)]
        wait: bool,
    },
    /// Show the last stream, commit or reclaim job of each disk
    Jobs,
    /// Pause, resume or cancel a disk's job, or change its rate limit
    Job {
        /// The disk's name
        disk: String,
        #[command(flatten)]
        change: JobChangeArgs,
    },
    /// Print the names of the disks, for completions
    #[command(hide = true)]
    Names,
    /// Read the configuration file and the images' sizes again
    Reload,
    /// Stop the server cleanly, and wait until it has stopped
    Shutdown,
}

#[derive(Debug, Subcommand)]
pub enum WorkersCommand {
    /// List the workers
    List,
    /// Start a worker; it gets queues through `attach`, from new disks and from the balancer
    Add(WorkerArgs),
    /// Remove a worker; its queues move to the others first
    Remove {
        /// The worker's number, from `bareblk ctl workers`
        #[arg(value_parser = worker)]
        worker: u32,
        #[command(flatten)]
        timeout: Timeout,
    },
}

#[derive(Debug, Args)]
pub struct JobArgs {
    /// The disk's name
    pub disk: String,
    /// Maximum copy rate in bytes per second (K, M, G, T: powers of 1024) [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = size_bytes)]
    pub rate: Option<u64>,
    /// Wait until the job has ended, and show its progress; Ctrl-C does not stop the job. Without --wait, exit code 0 only
    /// means that the job has started
    #[arg(long)]
    pub wait: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct JobChangeArgs {
    /// Pause the job
    #[arg(long)]
    pub pause: bool,
    /// Resume the job
    #[arg(long)]
    pub resume: bool,
    /// Cancel the job; the guest stays in its present image
    #[arg(long)]
    pub cancel: bool,
    /// Maximum copy rate in bytes per second; off: no limit
    #[arg(long, value_name = "BYTES|off", value_parser = rate)]
    pub rate: Option<u64>,
}

fn rate(text: &str) -> Result<u64> {
    if text == "off" { Ok(0) } else { size_bytes(text) }
}

#[derive(Clone, Copy, Debug, Args)]
pub struct Timeout {
    /// How long to wait for requests in flight, in seconds
    #[arg(long = "timeout", value_name = "S", default_value_t = 10, value_parser = number("whole seconds, without a unit,", 0..=MAX_TIMEOUT_MS / 1000))]
    pub seconds: u64,
}

/// A worker, or `None`. A type of its own, because clap reads an `Option` as an optional argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice(pub Option<u32>);

fn choice(text: &str) -> Result<Choice> {
    if text == "none" {
        return Ok(Choice(None));
    }
    let worker =
        text.parse().context("expected a worker number (see `bareblk ctl workers`) or the word `none`")?;
    Ok(Choice(Some(worker)))
}

fn worker(text: &str) -> Result<u32> {
    text.parse().map_err(|_| anyhow!("give the number of a worker (from `bareblk ctl workers`)"))
}

/// Parses `DISK=FILE`. The first `=` ends the disk's name.
fn snapshot_file(text: &str) -> Result<(String, PathBuf)> {
    match text.split_once('=') {
        Some((disk, file)) if !disk.is_empty() && !file.is_empty() => Ok((disk.to_owned(), file.into())),
        _ => bail!("give DISK=FILE, such as root=/images/root.snapshot"),
    }
}

/// Parses the time between two readings: a tenth of a second to an hour.
pub fn pause(text: &str) -> Result<Duration> {
    let pause = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match pause {
        Some(pause) if (SHORTEST_PAUSE..=LONGEST_PAUSE).contains(&pause) => Ok(pause),
        _ => bail!("give a number of seconds from 0.1 to 3600, without a unit"),
    }
}

/// `queues=4` is a number, `readonly=true` a boolean and `image=disk.raw` a text, as in TOML; a value in quotes is
/// always a text.
fn setting(text: &str) -> Result<(String, Value)> {
    let Some((key, value)) = text.split_once('=').filter(|(key, _)| !key.is_empty()) else {
        bail!("give KEY=VALUE, such as queues=4");
    };
    let parsed = toml::from_str::<Line>(&format!("value = {value}")).ok();
    let value = parsed.map_or_else(|| Value::from(value), |line| line.value);
    Ok((key.to_owned(), value))
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    value: Value,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_is_a_number_or_none() {
        assert_eq!((choice("none").unwrap(), choice("7").unwrap()), (Choice(None), Choice(Some(7))));
        for text in ["", "None", "-1", "4294967296"] {
            assert!(choice(text).is_err(), "{text}");
        }
    }

    #[test]
    fn worker_that_is_no_number_is_refused_in_plain_words() {
        assert_eq!(worker("7").unwrap(), 7);
        for text in ["", "abc", "-1", "4294967296"] {
            assert!(
                worker(text).unwrap_err().to_string().starts_with("give the number of a worker"),
                "{text}"
            );
        }
    }

    #[test]
    fn readings_are_a_tenth_of_a_second_to_an_hour_apart() {
        assert_eq!(pause("0.5").unwrap(), Duration::from_millis(500));
        assert_eq!([pause("0.1").unwrap(), pause("3600").unwrap()], [SHORTEST_PAUSE, LONGEST_PAUSE]);
        for text in ["0", "0.05", "3600.1", "-1", "1s", "", "nan", "inf", "1e300"] {
            assert!(pause(text).unwrap_err().to_string().contains("from 0.1 to 3600"), "{text}");
        }
    }

    #[test]
    fn settings_have_the_types_that_toml_gives_them() {
        let value = |text| setting(text).unwrap().1;
        assert_eq!(value("queues=4"), Value::from(4));
        assert_eq!(value("readonly=true"), Value::from(true));
        assert_eq!(value("image=/a/b.raw"), Value::from("/a/b.raw"));
        assert_eq!(value("serial=\"42\""), Value::from("42"));
        assert_eq!(value("serial=a=b"), Value::from("a=b"));
        assert_eq!(value("serial=1\nimage = 2"), Value::from("1\nimage = 2"));
    }

    #[test]
    fn setting_without_key_or_value_is_refused() {
        assert!(setting("queues").is_err());
        assert!(setting("=4").is_err());
    }
}
